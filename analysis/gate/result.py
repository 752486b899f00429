"""The outcome of a gate's conditions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...schemas.results import Table
from ..rows import table

FAILED, PASSED, CANNOT_TELL = "failed", "passed", "cannot tell"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The outcome of one condition."""

    condition: str
    """The condition as given."""
    metric: str
    """Full name of the number; `check` for the condition that the comparison has no fault."""
    value: float
    """Value of the number over the run, over its last steps, or at the worst step; for `check` the number of faults found."""
    low: float | None
    """Lower end of the interval over groups; None without an interval, in which case `how` says why."""
    high: float | None
    bound: float | None
    verdict: str
    """`failed`, `passed`, or `cannot tell` if the interval contains the bound, or is expected but missing."""
    fails: bool
    """True if the value violates the condition, or proves nothing because tokens are excluded from it. Determines the
    exit code."""
    steps_beyond: int | None
    """Number of steps whose own value violates the condition; None for `check` and for counts, which grow with the steps."""
    worst_step: int | None
    """Step whose own value is furthest beyond the bound, or nearest to it."""
    how: str
    """Steps beyond the bound, and how the interval was computed; for `check` the faults found."""

    @property
    def warns(self) -> bool:
        """True if the condition passes although single steps violate it."""
        return not self.fails and bool(self.steps_beyond)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gated(Table):
    """The verdicts on all conditions, in the order given."""

    _text = "tim_trace.analysis.gate.reporters:gated_text"

    verdicts: tuple[Verdict, ...]

    @property
    def fails(self) -> bool:
        """True if any condition fails."""
        return any(verdict.fails for verdict in self.verdicts)

    def _table(self) -> tuple[Sequence[str], Sequence[Sequence[Any]]]:
        rows = table(self.verdicts)
        return rows.columns, rows.rows
