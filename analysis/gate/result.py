"""What became of a gate's conditions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...schemas.results import Table
from ..rows import table

FAILED, PASSED, CANNOT_TELL = "failed", "passed", "cannot tell"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of one condition."""

    condition: str
    """As it was given."""
    metric: str
    """Its full name; `check` for the validity of the comparison."""
    value: float
    """Of the run; of `check` the number of faults found."""
    low: float | None
    """Ends of the interval over groups; None where there is none: `how` says why."""
    high: float | None
    bound: float | None
    verdict: str
    """`failed`, `passed`, or `cannot tell` where the interval lies on both sides of the bound, or there is none to tell by."""
    fails: bool
    """Whether the value violates the condition, or leaves out tokens and so proves nothing: this decides the exit code."""
    how: str
    """How the interval was found; of `check` what was found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gated(Table):
    """What became of every condition, in their order."""

    _text = "tim_trace.analysis.gate.reporters:gated_text"

    verdicts: tuple[Verdict, ...]

    @property
    def fails(self) -> bool:
        """Whether a value violates its condition."""
        return any(verdict.fails for verdict in self.verdicts)

    def _table(self) -> tuple[Sequence[str], Sequence[Sequence[Any]]]:
        rows = table(self.verdicts)
        return rows.columns, rows.rows
