"""The possible causes of a collapse, and one of them with its evidence."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..advice import Advice
from ..check.finding import TITLES
from ..statement import Statement


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence(Statement):
    """A piece of evidence for or against a suspect, with the measured numbers; a code of text.EVIDENCE."""

    points: float
    """Natural logarithm of odds; negative if against the suspect."""


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
"""Code of a suspect -> its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """One possible cause of a collapse."""

    code: str
    """A code of SUSPECTS."""
    detail: str = ""
    """The kind of mismatch: a code of check's titles."""
    evidence: tuple[Evidence, ...] = ()
    probability: float = 0.0
    """Probability that it is the cause, 0 to 1; all suspects sum to 1."""
    next: Advice = field(default_factory=Advice)
    """The cheapest replay or rerun that would decide; empty if there is none."""

    @property
    def title(self) -> str:
        """Name of the suspect, with its kind."""
        return SUSPECTS[self.code] + (f": {TITLES.get(self.detail, self.detail)}" if self.detail else "")

    @property
    def for_it(self) -> tuple[Evidence, ...]:
        """Evidence for it beyond the prior, strongest first."""
        found = [each for each in self.evidence if each.points > 0 and each.code != "prior"]
        return tuple(sorted(found, key=lambda each: -each.points))

    @property
    def points(self) -> float:
        """Sum of the points of all evidence."""
        return sum(evidence.points for evidence in self.evidence)
