"""Contracts of passes. A contract is the JSON of all settings that determine a pass's numbers, identified by a hash."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from hashlib import sha256
from typing import Any

Contract = dict[str, Any]

PREFIX_TREE = "prefix_tree"
"""Value of `packing` for TRL's TreeRow: the samples in a forward pass form a tree of shared prefixes."""
PACKED_ROWS = "rows"
"""Value of `packing` for rows concatenated without padding, as with verl's use_remove_padding."""


def canonical_json(value: Any) -> str:
    """Return the canonical JSON of `value`: sorted keys, no spaces."""
    return json.dumps(plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def contract_hash(contract: Contract) -> str:
    """Return the SHA-256 of a contract's canonical JSON, 64 hexadecimal digits.

    >>> contract_hash({"dtype": "float32", "engine": "trl"}) == contract_hash({"engine": "trl", "dtype": "float32"})
    True
    """
    return sha256(canonical_json(contract).encode()).hexdigest()


def engine_dtype(contract: Contract) -> str | None:
    """Return a recorded engine's compute dtype under torch's name; None if the contract does not state one."""
    found: Any = contract
    for name in ("config", "model_config", "dtype"):
        found = found.get(name) if isinstance(found, dict) else None
    return found.removeprefix("torch.") if isinstance(found, str) else None


def plain(value: Any) -> Any:
    """Convert a value to JSON types; objects of other types are converted with `str`."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, (dict, Mapping)):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((plain(item) for item in value), key=str)
    return str(value)


_NOT_NUMERIC = {"source", "arm", "attention_kernels", "built_in", "head", "sample"}
"""Fields that describe a pass but do not affect its numbers."""


def differences(recorded: Mapping[str, Any], now: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Yield each field that differs, as `field: recorded X, now Y`."""
    for name in sorted({*recorded, *now} - _NOT_NUMERIC):
        before, after = recorded.get(name), now.get(name)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            yield from differences(before, after, f"{path}{name}.")
        elif before != after:
            yield f"{path}{name}: recorded {before}, now {after}"
