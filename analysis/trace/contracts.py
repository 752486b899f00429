"""Contracts, field by field."""

from __future__ import annotations

import json
from typing import Any


def flat_contract(contract: Any, path: str = "") -> dict[str, str]:
    """A contract as path -> text, as `model.attention`; lists and what is empty stay one value."""
    if isinstance(contract, dict) and contract:
        found: dict[str, str] = {}
        for name, part in contract.items():
            found |= flat_contract(part, f"{path}.{name}" if path else str(name))
        return found
    return {path: field_text(contract)} if path else {}


def field_text(value: Any) -> str:
    """A field's value as text."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
