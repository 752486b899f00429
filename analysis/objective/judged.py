"""What is said of an objective."""

from __future__ import annotations

from dataclasses import dataclass

from ...schemas.loss import Loss
from ...schemas.results import Result
from ..rows import Rows
from .concentration import Concentration


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A figure over the run."""

    name: str
    value: float | None
    """None where there is nothing to divide by."""
    low: float | None
    """Ends of the interval over groups; None where there is none."""
    high: float | None
    no_interval: str | None
    """Why there is none, in words; None where there is one."""
    meaning: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective(Result):
    """What the mismatch does to a run's objective."""

    _text = "tim_trace.analysis.objective.text:objective_text"

    trace: str
    loss: Loss
    loss_from: str
    """Where the loss is from, in words."""
    passes: tuple[str, str, str]
    """What stands for the trainer at the sampling weights, for the engine, and for the policy inside the loss."""
    num_updates: int
    """Steps times their inner iterations: what a row of `steps` stands for."""
    num_rows: int
    """Sequences that went through the loss, once an inner iteration: what its means over sequences divide by."""
    num_sequences: int
    """Of these, those with a token that counts and has a finite logprob under every pass."""
    num_tokens: int
    num_terms: int
    """What the loss takes a ratio of and has an advantage: tokens, or sequences."""
    num_nan: int
    """Tokens with a NaN under a pass; they are in no figure."""
    num_inf: int
    num_groups: int
    """What is resampled for the intervals."""
    confidence: float
    verdict: tuple[str, ...]
    """Does the mismatch push one way, by how much, where: sentences."""
    notes: tuple[str, ...]
    cannot: tuple[str, ...]
    """What cannot be answered, a sentence each."""
    figures: dict[str, Estimate]
    """Name -> figure over the run."""
    concentration: Concentration | None
    """How few terms carry sum |b|; None where there is no bias."""
    steps: Rows
    """One row an update: step, iteration, and the figures."""

    def value(self, name: str) -> float | None:
        """A figure of the run; None where it has none."""
        found = self.figures.get(name)
        return None if found is None else found.value
