"""The possible causes of a collapse, called suspects, and the evidence for and against each."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..advice import Advice
from ..check.faults import ALL, TITLES, WEIGHT_CAUSES
from ..statement import Statement


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
    "data": "a change of the prompts",
    "truncation": "truncated responses",
    "reference": "the KL term or its reference model",
    "advantages": "the sign, scale or baseline of the advantages",
    "entropy": "entropy collapse or explosion",
    "length": "response length",
    "unknown": "something else",
}
"""Code of a suspect -> its name in results."""


_SIDES = {
    "optimizer": "trainer", "reference": "trainer", "entropy": "trainer", "truncation": "engine", "staleness": "engine",
    "reward": "data", "pairing": "data", "data": "data", "advantages": "data", "length": "data", "mismatch": "computation",
}  # fmt: skip
"""Code of a suspect -> the component to fix, named as in check, or `data`."""
_BY_EVIDENCE = {
    "engine_disagrees": "engine", "engine_stands_still": "engine", "earlier_weights_of_step": "engine",
    "earlier_weights_at_distance": "engine", "earlier_weights_of_several_steps": "engine", "not_sampled_so": "engine",
    "trainer_disagrees": "trainer", "logprobs_of_other_rows": "recording", "logprobs_in_other_rows": "recording",
}  # fmt: skip
"""Code of evidence from equal prefixes or rows, which is conclusive by itself -> the component to fix."""
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
        """Step named by the strongest evidence for it that names one; None if there is none."""
        return next((int(each.values["step"]) for each in self.for_it if "step" in each.values), None)

    @property
    def for_it(self) -> tuple[Evidence, ...]:
        """Evidence in favour of the suspect except the prior, strongest first."""
        found = [each for each in self.evidence if each.points > 0 and each.code != "prior"]
        return tuple(sorted(found, key=lambda each: -each.points))

    @property
    def points(self) -> float:
        """Sum of points over all evidence, for and against."""
        return sum(evidence.points for evidence in self.evidence)
