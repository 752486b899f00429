"""Contracts that other processes of a run declared: who samples or scores knows them, and the driver has the numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ...schemas.contract import Contract
from ...schemas.layout import PASSES
from ..contracts import read_contract
from ..store import Store


def declared_contract(folder: Path, pass_name: str, accepts: Callable[[Contract], bool]) -> Contract | None:
    """The newest accepted contract of a pass that lies in the trace; None without one."""
    paths = sorted((folder / PASSES / pass_name).glob("*.json"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    store = Store(folder)
    contracts = (read_contract(store, pass_name, path.stem) for path in paths)
    return next((contract for contract in contracts if accepts(contract)), None)
