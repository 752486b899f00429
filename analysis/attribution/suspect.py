"""The possible causes of a fall, and one of them with its evidence."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..advice import Advice
from ..check.finding import TITLES
from .evidence import Evidence

SUSPECTS = {
    "mismatch": "training-inference mismatch",
    "staleness": "staleness: the sampling weights were behind",
    "optimizer": "the optimizer or the learning rate",
    "reward": "a noisy or wrong reward",
    "pairing": "data paired wrongly",
    "data": "the prompts: other ones than before",
    "truncation": "responses that are cut off",
    "reference": "the KL term or its reference model",
    "advantages": "the sign, scale or baseline of the advantages",
    "entropy": "entropy collapse or explosion",
    "length": "the length of responses",
    "unknown": "something else, or what this trace does not show",
}
"""Code of a suspect -> what it is, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """One possible cause of a fall."""

    code: str
    """Of SUSPECTS."""
    detail: str = ""
    """Which kind of it: the class of a mismatch."""
    evidence: tuple[Evidence, ...] = ()
    probability: float = 0.0
    """That it is the cause, 0 to 1; those of all suspects sum to 1."""
    next: Advice = field(default_factory=Advice)
    """The cheapest replay or rerun that would decide; empty where there is none."""

    @property
    def title(self) -> str:
        """The suspect in words."""
        return SUSPECTS[self.code] + (f": {TITLES.get(self.detail, self.detail)}" if self.detail else "")

    @property
    def for_it(self) -> tuple[Evidence, ...]:
        """What speaks for it beside what it begins with, the strongest first."""
        found = [each for each in self.evidence if each.points > 0 and each.code != "prior"]
        return tuple(sorted(found, key=lambda each: -each.points))

    @property
    def points(self) -> float:
        """The sum of all evidence."""
        return sum(evidence.points for evidence in self.evidence)
