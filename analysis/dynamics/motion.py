"""How a run moved."""

from __future__ import annotations

from dataclasses import dataclass

from ...schemas.results import Result
from ..facts.changes import ChangePoint, FirstChange
from ..facts.fall import Fall
from ..statement import Statement
from .laws import EntropyLaw, Growth, LeadLag
from .schedule import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesSummary:
    """One series: where it began, where it ended, and when it changed."""

    name: str
    kind: str
    scale: str
    source: str
    num_steps: int
    """Steps with a value."""
    first: float
    """Median of the first tenth of the steps, five at least."""
    last: float
    """Median of the last tenth of the steps, five at least."""
    smallest: float
    largest: float
    not_finite: tuple[int, ...]
    """Steps at which NaN or an infinity was recorded."""
    changes: tuple[ChangePoint, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dynamics(Result):
    """The answer to: is anything moving, what moved first, and what would a schedule have done?"""

    _text = "tim_trace.analysis.dynamics.text:dynamics_text"

    trace: str
    run: str
    pair: str
    first_step: int
    last_step: int
    num_steps: int
    summary_codes: tuple[Statement, ...]
    """The answer, of text.SUMMARY."""
    fall: Fall | None
    """The fall of the run's outcome, as `attribute` finds it; None where none fell, or where `steps` takes a part of the run."""
    series: tuple[SeriesSummary, ...]
    onsets: tuple[FirstChange, ...]
    """Series by their first change, the earliest first."""
    lead_lag: tuple[LeadLag, ...]
    schedule: Schedule | None
    """None where no lengths are known."""
    growth: tuple[Growth, ...]
    """How fast k3 compounds."""
    entropy_law: EntropyLaw | None
    unanswered_codes: tuple[Statement, ...]
    """What cannot be answered from this trace, of text.UNANSWERED."""
