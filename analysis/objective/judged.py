"""The result of `objective`: the effect of the mismatch on a run's objective."""

from __future__ import annotations

from dataclasses import dataclass

from ...schemas.loss import Loss
from ...schemas.results import Result
from ...schemas.steps import ALL_STEPS
from ..rows import Rows
from ..statement import Statement, sentences
from .sentences import CANNOT, NOTES, loss_basis, verdict_sentence


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A figure over the run, with its interval."""

    name: str
    value: float | None
    """Value of the figure; None if its divisor is 0."""
    low: float | None
    """Lower end of the interval over groups; None without an interval."""
    high: float | None
    no_interval: str | None
    """Why there is no interval; None if there is one."""
    meaning: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective(Result):
    """The effect of the mismatch on a run's objective."""

    _text = "tim_trace.analysis.objective.text:objective_text"

    trace: str
    steps_asked: str = ALL_STEPS
    """The analyzed steps, as given."""
    loss: Loss
    loss_basis: tuple[Statement, ...]
    """Where the loss comes from: codes of sentences.loss_basis."""
    passes: tuple[str, str, str]
    """Passes used as the trainer at the sampling weights, the engine, and the policy inside the loss."""
    num_updates: int
    """Number of (step, inner iteration) pairs; `steps` has one row for each."""
    num_rows: int
    """Sequences that went through the loss, counted once per inner iteration; divisor of the loss's sequence means."""
    num_sequences: int
    """Sequences in `num_rows` with at least one token that counts in the loss and has a finite logprob in every
    pass."""
    num_tokens: int
    num_terms: int
    """Number of terms with an advantage. A term is what the loss takes one ratio for: a token or a sequence."""
    num_nan: int
    """Number of tokens with NaN in any pass, which all figures exclude. `num_inf` is the same for infinities."""
    num_inf: int
    num_groups: int
    """Number of groups that are resampled to obtain the intervals."""
    confidence: float
    verdict_codes: tuple[Statement, ...]
    """Direction, size and location of the bias: codes of sentences.VERDICT."""
    note_codes: tuple[Statement, ...]
    """Caveats: codes of sentences.NOTES."""
    cannot_codes: tuple[Statement, ...]
    """Unanswerable questions: codes of sentences.CANNOT."""
    figures: dict[str, Estimate]
    """Name -> figure over the run; see figures.FIGURES."""
    steps: Rows
    """One row per update: step, iteration, and the figures."""

    @property
    def verdict(self) -> tuple[str, ...]:
        """Direction, size and location of the bias, in sentences."""
        return tuple(verdict_sentence(part, self.confidence) for part in self.verdict_codes)

    @property
    def notes(self) -> tuple[str, ...]:
        """Caveats on the figures, in sentences."""
        return sentences(self.note_codes, NOTES)

    @property
    def cannot(self) -> tuple[str, ...]:
        """Unanswerable questions and the data they need, in sentences."""
        return sentences(self.cannot_codes, CANNOT)

    @property
    def loss_from(self) -> str:
        """Where the loss comes from, in words."""
        return ", with ".join(sentences(self.loss_basis, loss_basis()))

    def value(self, name: str) -> float | None:
        """Return the value of a figure over the run; None if the figure has no value."""
        estimate = self.figures.get(name)
        return None if estimate is None else estimate.value
