"""Comparison between two contracts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

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
