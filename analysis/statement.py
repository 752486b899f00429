"""Statements in results: a code with numbers, rendered as a sentence when printed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

Measured = float | int | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """One statement in a result."""

    code: str
    """Stable code, listed in the catalogue of its package's text module."""
    values: Mapping[str, Measured] = field(default_factory=dict)


def sentences(statements: Iterable[Statement], catalogue: Mapping[str, str]) -> tuple[str, ...]:
    """Render statements from a catalogue that maps codes to format strings."""
    return tuple(catalogue[statement.code].format(**statement.values) for statement in statements)
