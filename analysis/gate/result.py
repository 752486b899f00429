"""The outcome of a gate's conditions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...schemas.results import Table
from ..rows import table, to_text

FAILED, PASSED, CANNOT_TELL = "failed", "passed", "cannot tell"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The outcome of one condition."""

    condition: str
    """The condition as given."""
    metric: str
    """Full name of the number; `check` for the condition that the comparison has no fault."""
    value: float
    """Value of the number over the run; for `check` the number of faults found."""
    low: float | None
    """Lower end of the interval over groups; None without an interval, in which case `how` says why."""
    high: float | None
    bound: float | None
    verdict: str
    """`failed`, `passed`, or `cannot tell` if the interval contains the bound, or is expected but missing."""
    fails: bool
    """True if the value violates the condition, or proves nothing because tokens are excluded from it. Determines the
    exit code."""
    how: str
    """How the interval was computed; for `check` the faults found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gated(Table):
    """The verdicts on all conditions, in the order given."""

    _text = "tim_trace.analysis.gate.result:gated_text"

    verdicts: tuple[Verdict, ...]

    @property
    def fails(self) -> bool:
        """True if any condition fails."""
        return any(verdict.fails for verdict in self.verdicts)

    def _table(self) -> tuple[Sequence[str], Sequence[Sequence[Any]]]:
        rows = table(self.verdicts)
        return rows.columns, rows.rows


def gated_text(gated: Gated, width: int | None = None) -> str:
    """Render the verdicts as a table with one row per condition."""
    return to_text(table(gated.verdicts), width)
