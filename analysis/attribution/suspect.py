"""The possible causes of a collapse, called suspects, and the evidence for or against each."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..advice import Advice
from ..check.faults import TITLES
from ..statement import Statement


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence(Statement):
    """A piece of evidence for or against a suspect, with the measured numbers; its code is a key in text.EVIDENCE."""

    points: float
    """Natural logarithm of the odds that the evidence contributes; negative if it is against the suspect."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """One possible cause of a collapse."""

    code: str
    """Code of the suspect, a key in SUSPECTS."""
    detail: str = ""
    """The kind of mismatch, as one of check's finding codes; empty for other suspects."""
    evidence: tuple[Evidence, ...] = ()
    probability: float = 0.0
    """Probability that the suspect is the cause, 0 to 1; the probabilities of all suspects sum to 1."""
    next: Advice = field(default_factory=Advice)
    """The cheapest replay or rerun that would decide whether the suspect is the cause; empty if there is none."""

    @property
    def title(self) -> str:
        """Name of the suspect, followed by the kind of mismatch if known."""
        return SUSPECTS[self.code] + (f": {TITLES.get(self.detail, self.detail)}" if self.detail else "")

    @property
    def for_it(self) -> tuple[Evidence, ...]:
        """Evidence in favour of the suspect, without the prior, strongest first."""
        found = [each for each in self.evidence if each.points > 0 and each.code != "prior"]
        return tuple(sorted(found, key=lambda each: -each.points))

    @property
    def points(self) -> float:
        """Sum of points over all evidence, for and against."""
        return sum(evidence.points for evidence in self.evidence)
