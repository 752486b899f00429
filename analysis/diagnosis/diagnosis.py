"""What a diagnosis says."""

from __future__ import annotations

from dataclasses import dataclass

from ...schemas.results import Result
from ..check.checked import Checked
from .alarms import Alarm
from .figures import Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """What each side computed in, as far as contracts say and logprobs show."""

    declared: tuple[str | None, str | None]
    """dtypes of the contracts."""
    logits: tuple[str | None, str | None]
    """dtypes whose grid the logits lie on: see check.detectors.logit_grid."""
    values: tuple[str | None, str | None]
    """dtypes that the recorded logprobs were rounded to."""
    sentence: str
    """The class of numerics, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A published figure, and the trace's own under the same definition."""

    figure: Figure
    own: float
    fits: bool
    """Whether it was measured with the dtypes of this trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sounded:
    """A published alarm level, and whether the trace passes it."""

    alarm: Alarm
    own: float
    sounds: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """What a replay that the trace holds says: put in the place of pass a, how much of the gap it removes."""

    arm: str
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
    """Why there is none, in words; None where there is one."""
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis(Result):
    """The answer to: valid, which factor, normal?"""

    _text = "tim_trace.analysis.diagnosis.text:diagnosis_text"

    checked: Checked
    numerics: Numerics
    metrics: dict[str, float]
    """The trace's own figures, by the names of `stats` and of the frameworks."""
    normal: str
    """Whether the gap is normal, in words."""
    figures: tuple[Compared, ...]
    alarms: tuple[Sounded, ...]
    replays: tuple[Settled, ...]
    next: tuple[str, ...]
    """Commands that would settle what is open."""
