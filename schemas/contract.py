"""The contract of a pass: everything that decides its numbers, as JSON with a hash."""

from __future__ import annotations

import json
import math
from hashlib import sha256
from typing import Any

Contract = dict[str, Any]

PREFIX_TREE = "prefix_tree"
"""`packing` of TRL's TreeRow: the samples of a forward as a tree of what they begin with alike."""
PACKED_ROWS = "rows"
"""`packing` of rows that lie behind each other in a forward without padding, as verl's use_remove_padding puts them."""


def canonical_json(value: Any) -> str:
    """Write `value` as the one JSON text that the same content always gives: sorted keys, no spaces."""
    return json.dumps(plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def contract_hash(contract: Contract) -> str:
    """Identify a contract by the SHA-256 of its canonical JSON, 64 hexadecimal digits.

    >>> contract_hash({"dtype": "float32", "engine": "trl"}) == contract_hash({"engine": "trl", "dtype": "float32"})
    True
    """
    return sha256(canonical_json(contract).encode()).hexdigest()


def engine_dtype(contract: Contract) -> str | None:
    """torch's name of the dtype that a recorded engine computed in; None where its contract does not say."""
    found: Any = contract
    for name in ("config", "model_config", "dtype"):
        found = found.get(name) if isinstance(found, dict) else None
    return found.removeprefix("torch.") if isinstance(found, str) else None


def plain(value: Any) -> Any:
    """Reduce to what JSON can say; an object of another library becomes its text."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((plain(item) for item in value), key=str)
    return str(value)
