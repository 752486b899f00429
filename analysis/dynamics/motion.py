"""Result of `dynamics`."""

from __future__ import annotations

from dataclasses import dataclass

from ...schemas.results import Result
from ..facts.changes import ChangePoint, FirstChange
from ..facts.fall import Fall
from ..statement import Statement
from .growth import Growth


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesSummary:
    """Summary of one series: start, end and changes."""

    name: str
    kind: str
    scale: str
    source: str
    num_steps: int
    """Number of steps with a value."""
    first: float
    """Median of the first tenth of the steps, at least five."""
    last: float
    """Median of the last tenth of the steps, at least five."""
    smallest: float
    largest: float
    not_finite: tuple[int, ...]
    """Steps at which the value is NaN or infinite."""
    changes: tuple[ChangePoint, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dynamics(Result):
    """Changes of a run's series, and their order."""

    _text = "tim_trace.analysis.dynamics.text:dynamics_text"

    trace: str
    run: str
    pair: str
    first_step: int
    last_step: int
    num_steps: int
    summary_codes: tuple[Statement, ...]
    """Summary of the run, as codes in text.SUMMARY."""
    fall: Fall | None
    """Collapse of the run's outcome as found by `attribute`; None without one, or if `steps` restricts the run."""
    series: tuple[SeriesSummary, ...]
    onsets: tuple[FirstChange, ...]
    """First change of each series, earliest first."""
    growth: tuple[Growth, ...]
    """Growth rates of k3."""
    unanswered_codes: tuple[Statement, ...]
    """What the trace cannot show, as codes in text.UNANSWERED."""
