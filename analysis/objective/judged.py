"""The objective of a run, and what the mismatch does to it."""

from __future__ import annotations

from dataclasses import dataclass

from ...schemas.loss import Loss
from ...schemas.results import Result
from ...schemas.steps import ALL_STEPS
from ..rows import Rows
from ..statement import Statement, sentences
from .concentration import Concentration
from .sentences import CANNOT, NOTES, loss_basis, verdict_sentence


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A figure over the run."""

    name: str
    value: float | None
    """None if the divisor is 0."""
    low: float | None
    """Ends of the interval over groups; None without an interval."""
    high: float | None
    no_interval: str | None
    """Why there is no interval; None where there is one."""
    meaning: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective(Result):
    """What the mismatch does to a run's objective."""

    _text = "tim_trace.analysis.objective.text:objective_text"

    trace: str
    steps_asked: str = ALL_STEPS
    """Which steps were looked at, as they were asked for."""
    loss: Loss
    loss_basis: tuple[Statement, ...]
    """Where the loss is from, of sentences.loss_basis."""
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
    verdict_codes: tuple[Statement, ...]
    """Whether the mismatch pushes one way, by how much, where, of sentences.VERDICT."""
    note_codes: tuple[Statement, ...]
    """Of text.NOTES."""
    cannot_codes: tuple[Statement, ...]
    """What cannot be answered, of sentences.CANNOT."""
    figures: dict[str, Estimate]
    """Name -> figure over the run."""
    concentration: Concentration | None
    """How few terms carry sum |b|; None where there is no bias."""
    steps: Rows
    """One row an update: step, iteration, and the figures."""

    @property
    def verdict(self) -> tuple[str, ...]:
        """Whether the mismatch pushes one way, by how much, where: in sentences."""
        return tuple(verdict_sentence(part, self.confidence) for part in self.verdict_codes)

    @property
    def notes(self) -> tuple[str, ...]:
        """What to know of the figures."""
        return sentences(self.note_codes, NOTES)

    @property
    def cannot(self) -> tuple[str, ...]:
        """What cannot be answered, and what would have to be recorded."""
        return sentences(self.cannot_codes, CANNOT)

    @property
    def loss_from(self) -> str:
        """Where the loss is from."""
        return ", with ".join(sentences(self.loss_basis, loss_basis()))

    def value(self, name: str) -> float | None:
        """A figure of the run; None where it has none."""
        estimate = self.figures.get(name)
        return None if estimate is None else estimate.value
