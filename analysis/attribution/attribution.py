"""Whether a run fell, and why."""

from __future__ import annotations

from dataclasses import dataclass

from ...schemas.results import Result
from ...schemas.steps import ALL_STEPS
from ..facts.fall import Fall
from ..facts.recorded import RecordedChange
from ..statement import Statement
from .silent import SilentChange
from .suspect import Suspect

OBSERVATION, INTERVENTION = "observation", "intervention"

MIN_PROBABILITY_OF_CAUSE = 0.5
"""A suspect is named as the cause above it: more probable than all others together."""
MIN_PROBABILITY_OF_SUSPECT = 0.05
"""The first suspect is named from it on, where no cause is sure."""
MAX_PROBABILITY_CLEARED = 0.05
"""Below it the mismatch is cleared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesOnset:
    """The change of a series that lies nearest to the fall."""

    series: str
    step: int
    low: int
    high: int
    before: float
    after: float
    order: str
    """`first` (before the fall, intervals apart), `with` (the order is not decided), or `after` it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotFinite:
    """A series that is NaN or infinite to the end of the run."""

    series: str
    step: int
    """The first step from which every recorded value is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference(Statement):
    """One thing in which a run and its control differ, of text.DIFFERENCES."""

    suspect: str
    """The suspect that it belongs to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution(Result):
    """Whether a run fell, and why."""

    _text = "tim_trace.analysis.attribution.text:attribution_text"

    trace: str
    steps: str = ALL_STEPS
    """Which steps were looked at, as they were asked for."""
    control: str | None
    kind: str
    """`observation` of one run, or `intervention`: beside a control that differs in known ways."""
    num_steps: int
    outcome: str
    """The series that was judged: an evaluation where one was logged, else the reward; empty where there is neither."""
    fall: Fall | None
    onsets: tuple[SeriesOnset, ...]
    changes: tuple[RecordedChange, ...]
    """Everything recorded that changed within the interval of the fall or shortly before it, the most abnormal first, and last
    what only follows; empty where nothing fell."""
    suspects: tuple[Suspect, ...]
    """The most probable first; empty where nothing fell."""
    silent: SilentChange | None = None
    """What was changed so that the recorded reward no longer tells of a fall; None where one is seen or nothing was."""
    supposed: SilentChange | None = None
    """What would be the cause if the run did worse all the same, where no fall is seen and nothing proves one; None where nothing was
    changed."""
    not_finite: tuple[NotFinite, ...] = ()
    """Rewards, gradient norms and losses that are no numbers at the end of the run, the earliest first: nothing is learned from them."""
    difference_codes: tuple[Difference, ...] = ()
    """What differs from the control, the earliest first."""
    note_codes: tuple[Statement, ...] = ()
    """What could not be asked of this trace, and why, of text.NOTES."""

    @property
    def supposed_cause(self) -> SilentChange | None:
        """`supposed`, where one suspect is more probable than all others together."""
        first = self.supposed.suspects[0] if self.supposed else None
        is_one = first is not None and first.code != "unknown" and first.probability > MIN_PROBABILITY_OF_CAUSE
        return self.supposed if is_one else None

    @property
    def is_intervention(self) -> bool:
        """Whether a control decides."""
        return self.kind == INTERVENTION

    @property
    def clears_mismatch(self) -> bool:
        """Whether the mismatch is hardly the cause: less than one in twenty."""
        return any(
            suspect.code == "mismatch" and suspect.probability < MAX_PROBABILITY_CLEARED for suspect in self.suspects
        )

    @property
    def cause(self) -> str | None:
        """The suspect that is more probable than all others together; None where nothing fell, or none is."""
        first = self.suspects[0] if self.suspects else None
        if first is None or first.probability <= MIN_PROBABILITY_OF_CAUSE or first.code == "unknown":
            return None
        return first.code

    @property
    def first_suspect(self) -> Suspect | None:
        """The most probable suspect that has a name, sure or not; None where nothing fell, or where each of them is less than one in twenty."""
        named = next((suspect for suspect in self.suspects if suspect.code != "unknown"), None)
        return named if named is not None and named.probability >= MIN_PROBABILITY_OF_SUSPECT else None
