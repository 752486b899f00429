from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

Measured = float | int | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    code: str
    """Stable identifier of a sentence in the analysis's text module."""
    values: Mapping[str, Measured] = field(default_factory=dict)


def sentences(statements: Iterable[Statement], catalogue: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(catalogue[statement.code].format(**statement.values) for statement in statements)
