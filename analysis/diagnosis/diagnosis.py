"""The result of a diagnosis, in codes and numbers; text.py has the sentences."""

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
"""Share of the mismatch that a replay must remove to have settled its cause."""
ADDS_LITTLE = 0.1
"""A replay that changes less of the mismatch than this neither removes nor adds a part of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """What each side computed in, as far as contracts say and logprobs show."""

    passes: tuple[str, str]
    declared: tuple[str | None, str | None]
    """dtypes of the contracts."""
    logits: tuple[str | None, str | None]
    """dtypes whose grid the logits lie on: see check.detectors.logit_grid."""
    values: tuple[str | None, str | None]
    """dtypes that the recorded logprobs were rounded to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureComparison:
    """A published figure, and the trace's own under the same definition."""

    figure: PublishedFigure
    own: float
    fits: bool
    """Whether its coarser side is as coarse as the coarser side of this trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeComparison:
    """The size of the mismatch against what others measured on healthy runs."""

    code: Literal["equal", "unpublished", "below", "within", "above"]
    """`equal`: no mismatch; `unpublished`: no figure is as coarse as this trace; else where `own` lies."""
    own: float
    """Root mean square of d, nats."""
    coarser: str | None
    """The coarser side's dtype, which decides the size; None where it is unknown."""
    low: float | None = None
    """Ends of the published range, nats; None for `equal` and `unpublished`."""
    high: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayEffect:
    """How much of the mismatch a replay that the trace holds removes, put in the place of pass a."""

    arm: str
    pair: tuple[str, str]
    num_tokens: int
    gap_rms: float
    """Of the pair over the replayed tokens, nats."""
    left_rms: float
    """Between the replay and pass b, nats."""
    removed: float
    """Share of mean d squared that the replay removes; negative where it adds to it."""
    low: float | None
    """Ends of its 95 % interval over groups; None where there is none."""
    high: float | None
    no_interval: str | None
    """Why there is none; None where there is one."""
    is_own_engine: bool = False
    """Whether it is a replay by the engine of pass b, with nothing else changed."""
    changes: str | None = None
    """The arm's words, as `dtype=fp16,batch-size=1`; None where the pass does not say them."""

    @property
    def code(self) -> Literal["settles", "repeats", "part", "nothing", "adds"]:
        """What the replay does to the mismatch: removes it, repeats pass b itself, removes a part of it, neither, or adds to it."""
        if self.removed > SETTLES:
            return "repeats" if self.is_own_engine else "settles"
        if self.removed > ADDS_LITTLE:
            return "part"
        return "nothing" if self.removed > -ADDS_LITTLE else "adds"


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis(Result):
    """The answer to: valid, which factor, normal?"""

    _text = "tim_trace.analysis.diagnosis.text:diagnosis_text"

    checked: CheckResult
    attribution: Attribution
    """Whether the run fell, where that begins, and the cause."""
    jumps: tuple[RecordedChange, ...]
    """Changes of the mismatch beyond ABRUPT, the largest first."""
    numerics: Numerics
    metrics: dict[str, float]
    """The trace's own figures, by the names of `stats` and of the frameworks."""
    size: SizeComparison
    figures: tuple[FigureComparison, ...]
    alarms: AlarmReadings
    replays: tuple[ReplayEffect, ...]
    next: tuple[Advice, ...]
    """Commands that would settle what is open."""
    located: Location | None = None
    """The newest result of `locate` that lies in the trace, without its operators; None where there is none."""

    @property
    def settled_by(self) -> ReplayEffect | None:
        """The replay that removes nearly all of the mismatch; None where none does."""
        return next((replay for replay in self.replays if replay.code == "settles"), None)
