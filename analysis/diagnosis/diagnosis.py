"""Result of a diagnosis, as codes and numbers; text.py has the sentences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...schemas.results import Result
from ..advice import Advice
from ..alarms.reading import AlarmReadings
from ..attribution.attribution import Attribution
from ..check.result import CheckResult
from ..facts.recorded import RecordedChange
from ..location import Location
from .figures import PublishedFigure

SETTLES = 0.9
"""Minimum share of the mismatch that a replay must remove to identify the cause."""
ADDS_LITTLE = 0.1
"""Share of the mismatch below which a replay counts as having no effect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """dtypes of both sides (a, b), from contracts and as inferred from logprobs; None where unknown."""

    passes: tuple[str, str]
    declared: tuple[str | None, str | None]
    """dtypes declared by the contracts."""
    logits: tuple[str | None, str | None]
    """dtypes that the logits were rounded to: see check.detectors.logit_grid."""
    values: tuple[str | None, str | None]
    """dtypes that the recorded logprobs were rounded to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureComparison:
    """A published figure and the trace's value under the same definition."""

    figure: PublishedFigure
    own: float
    fits: bool
    """True if its coarser dtype is that of this trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeComparison:
    """Size of the mismatch relative to published values of healthy runs."""

    code: Literal["equal", "unpublished", "below", "within", "above"]
    """`equal`: no mismatch; `unpublished`: no published value for this dtype; otherwise `own` relative to the range."""
    own: float
    """Root mean square of d, nats."""
    coarser: str | None
    """Coarser dtype of the two sides, which determines the size; None if unknown."""
    low: float | None = None
    """Ends of the published range, nats; None for `equal` and `unpublished`."""
    high: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayEffect:
    """Share of the mismatch removed by a replay in place of pass a."""

    arm: str
    pair: tuple[str, str]
    num_tokens: int
    gap_rms: float
    """Root mean square of d of the pair over the replayed tokens, nats."""
    left_rms: float
    """The same between the replay and pass b, nats."""
    removed: float
    """Share of mean squared d removed by the replay; negative if it increases it."""
    low: float | None
    """Bounds of its 95 % interval over groups; None without an interval."""
    high: float | None
    no_interval: str | None
    """Reason for a missing interval; None if there is one."""
    is_own_engine: bool = False
    """True for a replay by the engine of pass b with nothing else changed."""
    changes: str | None = None
    """Options of the arm, e.g. `dtype=fp16,batch-size=1`; None if not recorded."""

    @property
    def code(self) -> Literal["settles", "repeats", "part", "nothing", "adds"]:
        """Effect on the mismatch: removes it, reproduces pass b, removes part of it, none, or increases it."""
        if self.removed > SETTLES:
            return "repeats" if self.is_own_engine else "settles"
        if self.removed > ADDS_LITTLE:
            return "part"
        return "nothing" if self.removed > -ADDS_LITTLE else "adds"


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis(Result):
    """Whether a run collapsed and why, whether its comparison is valid, and whether its mismatch is normal."""

    _text = "tim_trace.analysis.diagnosis.text:diagnosis_text"

    checked: CheckResult
    attribution: Attribution
    """Collapse of the run, its onset, and its probable cause."""
    jumps: tuple[RecordedChange, ...]
    """Increases of the mismatch by a factor of ABRUPT or more, largest first."""
    numerics: Numerics
    metrics: dict[str, float]
    """Metric name, as in `stats` and the frameworks -> value of the trace."""
    size: SizeComparison
    figures: tuple[FigureComparison, ...]
    alarms: AlarmReadings
    replays: tuple[ReplayEffect, ...]
    next: tuple[Advice, ...]
    """Commands that answer what is still open."""
    located: Location | None = None
    """Newest result of `locate` in the trace, without its operators; None if there is none."""

    @property
    def settled_by(self) -> ReplayEffect | None:
        """Replay that removes nearly all of the mismatch; None if none does."""
        return next((replay for replay in self.replays if replay.code == "settles"), None)
