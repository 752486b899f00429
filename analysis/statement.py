"""What a result says, as a code with its numbers; a sentence is made of it where it is printed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

Measured = float | int | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """One thing that a result says."""

    code: str
    """Stable, of the catalogue in the text.py of its room."""
    values: Mapping[str, Measured] = field(default_factory=dict)
    """Name -> number or name that the sentence holds."""


def sentences(statements: Iterable[Statement], catalogue: Mapping[str, str]) -> tuple[str, ...]:
    """Their sentences, from a catalogue that holds a format string by code."""
    return tuple(catalogue[statement.code].format(**statement.values) for statement in statements)
