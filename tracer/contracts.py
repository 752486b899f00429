"""Read the contracts of a trace's passes; each file is named by the hash of its content."""

from __future__ import annotations

from typing import Any

from ..schemas.contract import contract_hash
from ..schemas.documents import read_object
from ..schemas.errors import DamagedTrace
from ..schemas.layout import PASSES
from .store import Store, first_line


def read_contract(store: Store, pass_name: str, digest: str, content: bytes | None = None) -> dict[str, Any]:
    """Return the contract with a hash; `content` is its file's if read. Raises DamagedTrace if it does not match."""
    relative = f"{PASSES}/{pass_name}/{digest}.json"
    where = store.shown(relative)
    try:
        found_there = read_object(store.read_json(relative) if content is None else content, where, "a contract")
        name, contract = found_there["pass"], dict(found_there["contract"])
        found = contract_hash(contract)
    except DamagedTrace:
        raise
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedTrace(f"{where}: not a contract ({first_line(error)}); restore it from a copy") from error
    if (name, found) != (pass_name, digest):
        raise DamagedTrace(f"{where}: its content does not match the hash in its name; restore it from a copy")
    return contract
