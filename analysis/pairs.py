"""Naming two passes."""

from __future__ import annotations

from ..schemas.errors import InvalidOption
from .source import Pair


def parse_pair(text: str) -> Pair:
    """Read `a:b`."""
    a, colon, b = text.partition(":")
    if not (a and colon and b) or ":" in b:
        raise InvalidOption(f"pair: got {text!r}; write two passes as a:b, as train:rollout")
    return a, b
