"""What moved first: the first change of every series, in order, as far as their intervals decide it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .changes import ChangePoint

LEAST_SD = 2.0
"""Smallest change, in standard deviations of the series' scatter, that begins an onset."""

PLANNED = ("learning_rate",)
"""Series that are set and not observed: they are in no order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstChange:
    """The first change of one series."""

    name: str
    kind: str
    """Of the series: `mismatch`, `reward` and so on."""
    change: ChangePoint
    undecided: tuple[str, ...]
    """Series whose onset has an interval that overlaps this one: which of the two came first is not decided."""
    may_be_first: bool
    """Whether no other onset came certainly before."""


def onsets_of(changes: Mapping[str, Sequence[ChangePoint]], kinds: Mapping[str, str]) -> tuple[FirstChange, ...]:
    """Order series by their first change of at least LEAST_SD; a series without one is left out."""
    first = {
        name: next((change for change in of_series if abs(change.size_in_sd) >= LEAST_SD), None)
        for name, of_series in changes.items()
        if name not in PLANNED
    }
    moved = {name: change for name, change in first.items() if change is not None}
    ends = min((change.high for change in moved.values()), default=0)
    order = sorted(moved, key=lambda name: (moved[name].step, moved[name].high, name))
    return tuple(
        FirstChange(
            name=name,
            kind=kinds[name],
            change=moved[name],
            undecided=tuple(other for other in order if other != name and _overlap(moved[name], moved[other])),
            may_be_first=moved[name].low <= ends,
        )
        for name in order
    )


def _overlap(a: ChangePoint, b: ChangePoint) -> bool:
    return a.low <= b.high and b.low <= a.high
