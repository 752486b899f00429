"""What an attribution says."""

from __future__ import annotations

from dataclasses import dataclass

from ...schemas.results import Result
from ..check.finding import TITLES
from .evidence import Evidence
from .fall import Fall

SUSPECTS = {
    "mismatch": "training-inference mismatch",
    "staleness": "staleness: the sampling weights were behind",
    "optimizer": "the optimizer or the learning rate",
    "reward": "a noisy or wrong reward",
    "pairing": "data paired wrongly",
    "entropy": "entropy collapse or explosion",
    "length": "the length of responses",
    "unknown": "something that this trace does not show",
}
"""Code of a suspect -> what it is, in words."""

OBSERVATION, INTERVENTION = "observation", "intervention"


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """One possible cause of a fall."""

    code: str
    """Of SUSPECTS."""
    detail: str = ""
    """Which kind of it, as the class of a mismatch."""
    evidence: tuple[Evidence, ...] = ()
    probability: float = 0.0
    """That it is the cause, 0 to 1; those of all suspects sum to 1."""
    next: str = ""
    """The cheapest replay or rerun that would decide."""

    @property
    def title(self) -> str:
        """The suspect in words."""
        return SUSPECTS[self.code] + (f": {TITLES.get(self.detail, self.detail)}" if self.detail else "")

    @property
    def points(self) -> float:
        """The sum of all evidence."""
        return sum(each.points for each in self.evidence)


@dataclass(frozen=True, slots=True, kw_only=True)
class Onset:
    """Where a series began to do something else, beside where the fall begins."""

    series: str
    step: int
    low: int
    high: int
    before: float
    after: float
    order: str
    """`first` (before the fall, intervals apart), `with` (the order is not decided), or `after` it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution(Result):
    """Whether a run fell, and why."""

    _text = "tim_trace.analysis.attribution.text:attribution_text"

    trace: str
    control: str | None
    kind: str
    """`observation` of one run, or `intervention`: beside a control that differs in known ways."""
    num_steps: int
    outcome: str
    """The series that was judged: an evaluation where one was logged, else the reward; empty where there is neither."""
    fall: Fall | None
    onsets: tuple[Onset, ...]
    suspects: tuple[Suspect, ...]
    """The most probable first; empty where nothing fell."""
    sentence: str
    differences: tuple[str, ...] = ()
    """What differs from the control, the earliest first."""
    notes: tuple[str, ...] = ()
    """What could not be asked of this trace, and why."""

    @property
    def clears_mismatch(self) -> bool:
        """Whether the mismatch is hardly the cause: less than one in twenty."""
        return any(suspect.code == "mismatch" and suspect.probability < 0.05 for suspect in self.suspects)

    @property
    def cause(self) -> str | None:
        """The suspect that is more probable than all others together; None where nothing fell, or none is."""
        if not self.suspects or self.suspects[0].probability <= 0.5 or self.suspects[0].code == "unknown":
            return None
        return self.suspects[0].code
