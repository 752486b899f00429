"""Statements of a result as codes with numbers; sentences are rendered when printed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

Measured = float | int | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """One statement of a result."""

    code: str
    """Stable code from the catalogue in the text module of its package."""
    values: Mapping[str, Measured] = field(default_factory=dict)


def sentences(statements: Iterable[Statement], catalogue: Mapping[str, str]) -> tuple[str, ...]:
    """Render statements from a catalogue of code -> format string."""
    return tuple(catalogue[statement.code].format(**statement.values) for statement in statements)
