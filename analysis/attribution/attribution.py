"""The result of `attribute`: the drop of a run, and the suspects for its cause."""

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
"""Probability above which a suspect is reported as the cause: more probable than all others together."""
MIN_PROBABILITY_OF_SUSPECT = 0.05
"""Minimum probability for a suspect to be named if the cause is unknown."""
MAX_PROBABILITY_CLEARED = 0.05
"""Probability below which the mismatch is ruled out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotFinite:
    """A series that is NaN or infinite until the end of the run."""

    series: str
    step: int
    """First step from which every recorded value is NaN or infinite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference(Statement):
    """A difference between a run and its baseline run; its code is a key in text.DIFFERENCES."""

    suspect: str
    """Code of the suspect that the difference supports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution(Result):
    """The drop of a run, what changed around it, and the suspects."""

    _text = "tim_trace.analysis.attribution.text:attribution_text"

    trace: str
    steps: str = ALL_STEPS
    """The steps asked about, as given. Facts may come from more of the run; see `facts.changes.known_run`."""
    control: str | None
    kind: str
    """`intervention` if the baseline run has the same first prompts and, in case of a drop, its differences point to
    one suspect; else `observation`."""
    num_steps: int
    outcome: str
    """The series judged: an evaluation if one was logged, else the reward; empty if neither was recorded."""
    fall: Fall | None
    changes: tuple[RecordedChange, ...]
    """Recorded changes within the onset interval or shortly before it, largest first, consequences last; empty if there
    is no drop."""
    suspects: tuple[Suspect, ...]
    """All suspects, most probable first; empty if the run has no drop."""
    silent: SilentChange | None = None
    """A change after which the recorded reward no longer measures the policy; None if there is a drop or no such change."""
    supposed: SilentChange | None = None
    """The most probable cause in case the run got worse without a visible drop; None with a drop, a `silent` change, or no change."""
    later: Fall | None = None
    """Drop of the run that begins after the selected steps; None if there is none."""
    not_finite: tuple[NotFinite, ...] = ()
    """Rewards, gradient norms and losses that are NaN or infinite until the end of the run, earliest first."""
    difference_codes: tuple[Difference, ...] = ()
    """Differences from the baseline run, earliest first."""
    note_codes: tuple[Statement, ...] = ()
    """Analyses that this trace does not support, with the reasons; their codes are keys in text.NOTES."""

    @property
    def supposed_cause(self) -> SilentChange | None:
        """`supposed` if one suspect is more probable than all others together, else None."""
        first = self.supposed.suspects[0] if self.supposed else None
        is_one = first is not None and first.code != "unknown" and first.probability > MIN_PROBABILITY_OF_CAUSE
        return self.supposed if is_one else None

    @property
    def is_intervention(self) -> bool:
        """True if `kind` is `intervention`."""
        return self.kind == INTERVENTION

    @property
    def clears_mismatch(self) -> bool:
        """True if the probability of mismatch is below MAX_PROBABILITY_CLEARED."""
        return any(
            suspect.code == "mismatch" and suspect.probability < MAX_PROBABILITY_CLEARED for suspect in self.suspects
        )

    @property
    def cause(self) -> str | None:
        """Code of the suspect that is more probable than all others together; None if there is no such suspect or no drop."""
        first = self.suspects[0] if self.suspects else None
        if first is None or first.probability <= MIN_PROBABILITY_OF_CAUSE or first.code == "unknown":
            return None
        return first.code

    @property
    def first_suspect(self) -> Suspect | None:
        """The most probable suspect other than `unknown`; None without a drop or below MIN_PROBABILITY_OF_SUSPECT."""
        named = next((suspect for suspect in self.suspects if suspect.code != "unknown"), None)
        return named if named is not None and named.probability >= MIN_PROBABILITY_OF_SUSPECT else None
