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
    """Evidence for or against a suspect. `code` is a key in text.EVIDENCE or text.DIFFERENCES."""

    points: float
    """Contribution to the suspect's log odds (natural log). Negative if it counts against the suspect."""


SUSPECTS = {
    "mismatch": "training-inference mismatch",
    "staleness": "staleness: the engine sampled with old weights",
    "optimizer": "the optimizer or the learning rate",
    "reward": "noisy or wrong rewards or labels",
    "pairing": "misaligned rows",
    "data": "a change in the prompts",
    "truncation": "truncated responses",
    "reference": "the KL term or its reference model",
    "advantages": "advantages with a wrong sign, scale or baseline",
    "entropy": "entropy collapse or explosion",
    "length": "response length",
    "unknown": "something else",
}
_SIDES = {
    "optimizer": "trainer", "reference": "trainer", "entropy": "trainer", "truncation": "engine", "staleness": "engine",
    "reward": "data", "pairing": "data", "data": "data", "advantages": "data", "length": "data", "mismatch": "computation",
}  # fmt: skip
"""Suspect -> component to fix, named as in `check`."""
_BY_EVIDENCE = {
    "engine_stands_still": "engine", "earlier_weights_of_step": "engine", "earlier_weights_at_distance": "engine",
    "not_sampled_so": "engine", "logprobs_in_other_rows": "recording",
}  # fmt: skip
"""Evidence code -> component to fix. Such evidence is conclusive because it compares identical prefixes or rows."""
_BY_FAULT = {fault.code: fault.broken for fault in ALL} | dict.fromkeys(WEIGHT_CAUSES, "engine")


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """A possible cause. `code` is a key in SUSPECTS."""

    code: str
    detail: str = ""
    """Kind of mismatch (a `check` finding code) if the suspect is `mismatch`, else empty."""
    evidence: tuple[Evidence, ...] = ()
    probability: float = 0.0
    next: Advice = field(default_factory=Advice)

    @property
    def title(self) -> str:
        return SUSPECTS[self.code] + (f": {TITLES.get(self.detail, self.detail)}" if self.detail else "")

    def titled(self, basis: str = "") -> str:
        kind = self.title.removeprefix(SUSPECTS[self.code])
        return f"{SUSPECTS[self.code]} ({self.probability:.0%}{f', {basis}' if basis else ''}){kind}"

    @property
    def proof(self) -> Evidence | None:
        return next((each for each in self.for_it if each.code in _BY_EVIDENCE), None)

    @property
    def broken(self) -> str | None:
        if self.proof is not None:
            return _BY_EVIDENCE[self.proof.code]
        if self.code == "staleness" and any(each.code.startswith("declared_lag") for each in self.for_it):
            return "versions"
        return _BY_FAULT.get(self.detail) or _SIDES.get(self.code)

    @property
    def since(self) -> int | None:
        return next((int(each.values["step"]) for each in self.for_it if "step" in each.values), None)

    @property
    def for_it(self) -> tuple[Evidence, ...]:
        found = [each for each in self.evidence if each.points > 0 and each.code != "prior"]
        return tuple(sorted(found, key=lambda each: -each.points))


@dataclass(frozen=True, slots=True, kw_only=True)
class SupposedCause:
    """Likely cause of a decline that the rewards do not show. Only an evaluation can confirm that the run got worse."""

    suspects: tuple[Suspect, ...]
    """Most probable first. `unknown` and `data` are left out if rewards for identical responses change at `step`."""
    step: int


OBSERVATION, INTERVENTION = "observation", "intervention"

MIN_PROBABILITY_OF_CAUSE = 0.5
"""A suspect whose probability exceeds this is reported as the cause."""
MIN_PROBABILITY_OF_SUSPECT = 0.05
MAX_PROBABILITY_CLEARED = 0.05


def _sure_code(suspects: tuple[Suspect, ...]) -> str | None:
    is_sure = suspects and suspects[0].code != "unknown" and suspects[0].probability > MIN_PROBABILITY_OF_CAUSE
    return suspects[0].code if is_sure else None


@dataclass(frozen=True, slots=True, kw_only=True)
class NotFinite:
    series: str
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference(Statement):
    suspect: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution(Result):
    """The drop in a run, the changes around it, and the suspects."""

    _text = "tim_trace.analysis.attribution.text:attribution_text"

    trace: str
    steps: str = ALL_STEPS
    """The `steps` option as given. Evidence may also come from steps outside this selection."""
    control: str | None
    kind: str
    """`intervention` if a baseline has the same prompts and all differences point to one suspect, else `observation`.
    """
    num_steps: int
    outcome: str
    """Series used to detect a drop: a logged evaluation, else the reward. Empty if neither was recorded."""
    fall: Fall | None
    changes: tuple[RecordedChange, ...]
    """Changes at or shortly before the onset: independent changes, largest first, then their consequences. Empty
    without a drop."""
    suspects: tuple[Suspect, ...]
    """Most probable first. Empty without a drop."""
    facts: tuple[Fact, ...] = ()
    supposed: SupposedCause | None = None
    later: Fall | None = None
    not_finite: tuple[NotFinite, ...] = ()
    difference_codes: tuple[Difference, ...] = ()
    note_codes: tuple[Statement, ...] = ()

    @property
    def supposed_cause(self) -> SupposedCause | None:
        """Return `supposed` if its first suspect is not `unknown` and has a probability above 50%, else None."""
        return self.supposed if self.supposed and _sure_code(self.supposed.suspects) else None

    @property
    def is_intervention(self) -> bool:
        return self.kind == INTERVENTION

    @property
    def clears_mismatch(self) -> bool:
        is_known = all(note.code != "no_shared_token" for note in self.note_codes)
        return is_known and any(
            suspect.code == "mismatch" and suspect.probability < MAX_PROBABILITY_CLEARED for suspect in self.suspects
        )

    @property
    def cause(self) -> str | None:
        """Code of the suspect with a probability above 50%. None if there is no such suspect or it is `unknown`."""
        return _sure_code(self.suspects)

    @property
    def first_suspect(self) -> Suspect | None:
        """Most probable suspect except `unknown`, or None if its probability is below MIN_PROBABILITY_OF_SUSPECT."""
        named = next((suspect for suspect in self.suspects if suspect.code != "unknown"), None)
        return named if named is not None and named.probability >= MIN_PROBABILITY_OF_SUSPECT else None
