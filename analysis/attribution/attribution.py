"""The result of `attribute`: the drop of a run, and the suspects for its cause."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...schemas.results import Result
from ...schemas.steps import ALL_STEPS
from ..advice import Advice
from ..check.faults import ALL, TITLES, WEIGHT_CAUSES
from ..facts.recorded import RecordedChange
from ..facts.series import Fall
from ..statement import Statement
from .fact import Fact


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence(Statement):
    """A piece of evidence for or against a suspect, with the measured numbers; its code is a key in text.EVIDENCE."""

    points: float
    """Log odds that the evidence contributes (natural logarithm); negative if it counts against the suspect."""


SUSPECTS = {
    "mismatch": "training-inference mismatch",
    "staleness": "staleness: the engine sampled with old weights",
    "optimizer": "the optimizer or the learning rate",
    "reward": "a noisy or wrong reward",
    "pairing": "misaligned rows",
    "data": "a change in the prompts",
    "truncation": "truncated responses",
    "reference": "the KL term or its reference model",
    "advantages": "the sign, scale or baseline of the advantages",
    "entropy": "entropy collapse or explosion",
    "length": "response length",
    "unknown": "something else",
}
"""Names of the suspects in results, by code."""


_SIDES = {
    "optimizer": "trainer", "reference": "trainer", "entropy": "trainer", "truncation": "engine", "staleness": "engine",
    "reward": "data", "pairing": "data", "data": "data", "advantages": "data", "length": "data", "mismatch": "computation",
}  # fmt: skip
"""The component to fix, named as in check, or `data`, by code of the suspect."""
_BY_EVIDENCE = {
    "engine_stands_still": "engine", "earlier_weights_of_step": "engine", "earlier_weights_at_distance": "engine",
    "earlier_weights_of_several_steps": "engine", "not_sampled_so": "engine", "logprobs_in_other_rows": "recording",
}  # fmt: skip
"""The component to fix, by code of evidence from identical prefixes or rows, which is conclusive by itself."""
_BY_FAULT = {fault.code: fault.broken for fault in ALL} | dict.fromkeys(WEIGHT_CAUSES, "engine")


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """One possible cause of a collapse."""

    code: str
    """Code of the suspect, a key in SUSPECTS."""
    detail: str = ""
    """The kind of mismatch, as a code of a check finding; empty for other suspects."""
    evidence: tuple[Evidence, ...] = ()
    probability: float = 0.0
    """Probability that the suspect is the cause, 0 to 1; the probabilities of all suspects sum to 1."""
    next: Advice = field(default_factory=Advice)
    """The cheapest replay or rerun that would confirm or rule out the suspect; empty if there is none."""

    @property
    def title(self) -> str:
        """Name of the suspect, followed by the kind of mismatch if known."""
        return SUSPECTS[self.code] + (f": {TITLES.get(self.detail, self.detail)}" if self.detail else "")

    def titled(self, basis: str = "") -> str:
        """Return the title with the probability of the suspect (all kinds together), and `basis`, the evidence it rests
        on."""
        kind = self.title.removeprefix(SUSPECTS[self.code])
        return f"{SUSPECTS[self.code]} ({self.probability:.0%}{f', {basis}' if basis else ''}){kind}"

    @property
    def proof(self) -> Evidence | None:
        """Evidence that proves by itself what to fix; None if there is none."""
        return next((each for each in self.for_it if each.code in _BY_EVIDENCE), None)

    @property
    def broken(self) -> str | None:
        """The component to fix if this suspect is the cause, as in `check`, or `data`; None for something else."""
        if self.proof is not None:
            return _BY_EVIDENCE[self.proof.code]
        if self.code == "staleness" and any(each.code.startswith("declared_lag") for each in self.for_it):
            return "versions"
        return _BY_FAULT.get(self.detail) or _SIDES.get(self.code)

    @property
    def since(self) -> int | None:
        """Step named by the strongest supporting evidence that names one; None if no evidence does."""
        return next((int(each.values["step"]) for each in self.for_it if "step" in each.values), None)

    @property
    def for_it(self) -> tuple[Evidence, ...]:
        """Evidence in favour of the suspect except the prior, strongest first."""
        found = [each for each in self.evidence if each.points > 0 and each.code != "prior"]
        return tuple(sorted(found, key=lambda each: -each.points))


@dataclass(frozen=True, slots=True, kw_only=True)
class SupposedCause:
    """The cause of a drop that only an evaluation would show."""

    suspects: tuple[Suspect, ...]
    """Suspects, most probable first; without `unknown` if identical responses get a different reward from `step` on."""
    step: int
    """Step at which the run's records change."""


OBSERVATION, INTERVENTION = "observation", "intervention"

MIN_PROBABILITY_OF_CAUSE = 0.5
"""Probability above which a suspect is reported as the cause: more probable than all others together."""
MIN_PROBABILITY_OF_SUSPECT = 0.05
"""Minimum probability at which a suspect is named if the cause is unknown."""
MAX_PROBABILITY_CLEARED = 0.05
"""Probability below which the mismatch is ruled out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotFinite:
    """A series that is NaN or infinite until the end of the run."""

    series: str
    step: int
    """Step from which every recorded value is NaN or infinite."""


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
    """The `steps` option as given. Facts may also come from other steps; see `facts.changes.known_run`."""
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
    facts: tuple[Fact, ...] = ()
    """Facts about the run and its differences from the baseline run, strongest first; empty without a drop."""
    supposed: SupposedCause | None = None
    """The most probable cause in case the run got worse without a visible drop; None with a drop, or without a change."""
    later: Fall | None = None
    """Drop of the run that begins after the selected steps; None if there is none."""
    not_finite: tuple[NotFinite, ...] = ()
    """Rewards, gradient norms and losses that are NaN or infinite until the end of the run, earliest first."""
    difference_codes: tuple[Difference, ...] = ()
    """Differences from the baseline run, earliest first."""
    note_codes: tuple[Statement, ...] = ()
    """Analyses that this trace does not support, with the reasons; their codes are keys in text.NOTES."""

    @property
    def supposed_cause(self) -> SupposedCause | None:
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
