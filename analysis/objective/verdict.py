"""Judge an objective's figures. The verdict is a list with codes and numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ...schemas.loss import ROLLOUT, TOKEN, Loss
from ...schemas.results import Result
from ...schemas.steps import ALL_STEPS
from ..rows import Rows
from ..statement import Measured, Statement, sentences
from .sentences import CANNOT, NOTES, loss_basis, verdict_sentence


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    name: str
    value: float | None
    """The figure's value, or None if its divisor is 0."""
    low: float | None
    """Interval from resampling groups. Both ends are None if `no_interval` is set."""
    high: float | None
    no_interval: str | None
    """Why the interval is missing, or None."""
    meaning: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective(Result):
    """How the mismatch affects a run's objective."""

    _text = "tim_trace.analysis.objective.text:objective_text"

    trace: str
    steps_asked: str = ALL_STEPS
    """Steps to analyse, as passed to `objective`."""
    loss: Loss
    loss_basis: tuple[Statement, ...]
    passes: tuple[str, str, str]
    """Passes used as the trainer (at the sampling weights), the engine, and the loss's current policy."""
    num_updates: int
    """Number of updates: one per step and inner iteration. Each update has a row in `steps`."""
    num_rows: int
    """Number of sequences in the loss, counted once per inner iteration. Means are taken over these sequences."""
    num_sequences: int
    """Number of sequences with at least one unmasked token that has a finite logprob in every pass."""
    num_tokens: int
    num_terms: int
    """Number of terms with an advantage. A term is a token, or a sequence if the loss takes one ratio per sequence."""
    num_nan: int
    """Number of tokens with a NaN logprob in any pass. They are left out of all figures."""
    num_inf: int
    """Number of tokens with an infinite logprob in any pass. They are left out of all figures."""
    num_groups: int
    """Number of groups. Intervals are computed by resampling groups."""
    confidence: float
    verdict_codes: tuple[Statement, ...]
    """Codes in sentences.VERDICT."""
    note_codes: tuple[Statement, ...]
    """Codes in sentences.NOTES."""
    cannot_codes: tuple[Statement, ...]
    """Codes in sentences.CANNOT."""
    figures: dict[str, Estimate]
    steps: Rows
    """One row per update, with its step, iteration and figures."""

    @property
    def verdict(self) -> tuple[str, ...]:
        """Sentences about the bias's direction, size and location."""
        return tuple(verdict_sentence(part, self.confidence) for part in self.verdict_codes)

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about caveats."""
        return sentences(self.note_codes, NOTES)

    @property
    def cannot(self) -> tuple[str, ...]:
        """Open questions, and the data to record to answer them."""
        return sentences(self.cannot_codes, CANNOT)

    @property
    def loss_from(self) -> str:
        return ", with ".join(sentences(self.loss_basis, loss_basis()))

    def value(self, name: str) -> float | None:
        """Return the value of a figure, or None if the figure is missing or undefined."""
        estimate = self.figures.get(name)
        return None if estimate is None else estimate.value


SMALL, LARGE = 0.001, 0.05
"""Limits for the bias relative to sum |f(rho*)|. A bias is negligible below SMALL, and large at LARGE or above. The
limits are conventions: noise in the rewards hides a bias of 0.1%, but not a bias of 5%."""


def verdict(loss: Loss, figures: Mapping[str, Estimate], steps: Rows, num_tokens: int) -> tuple[Statement, ...]:
    if not num_tokens:
        return (Statement(code="no_tokens"),)
    relative, size = figures.get("relative_bias"), figures.get("relative_abs_bias")
    if relative is None or size is None:
        return tuple(_without_bias(figures))
    if relative.value is None or size.value is None:
        return (Statement(code="no_advantage"),)
    if size.value == 0:
        is_exact = loss.denominator == ROLLOUT and loss.correction == "none"
        return (_in_ratio(loss, figures) if is_exact else Statement(code="no_effect"),)
    unclipped = figures.get("unclipped_relative_bias")
    way = direction(relative, size, unclipped)
    return (
        way,
        *_unclipped(unclipped),
        *(() if way.code.endswith(("_opposed", "_noise")) else _signs(figures)),
        *(() if way.code.endswith("_noise") else _where(steps)),
        *_flips(figures, loss),
        *_correction(figures),
    )


def direction(relative: Estimate, size: Estimate, unclipped: Estimate | None = None) -> Statement:
    """Return a statement about the bias's sign and size if its interval excludes 0, otherwise about the noise level.

    Clipping f(rho*) raises b by itself, so no sign is reported if the bias without the clip (`unclipped`) has the
    opposite sign.
    """
    bias, cancelling = relative.value or 0.0, size.value or 0.0
    values: dict[str, Measured] = {"relative_bias": bias, "relative_abs_bias": cancelling}
    if relative.low is None or relative.high is None:
        return Statement(code="undecided", values=values | {"reason": relative.no_interval or ""})
    values |= {"low": relative.low, "high": relative.high}
    if relative.low <= 0 <= relative.high:
        return Statement(code=f"{_size(cancelling, 'negligible', 'moderate', 'large')}_noise", values=values)
    sign = "opposed" if is_opposed(relative, unclipped) else f"push_{'up' if bias > 0 else 'down'}"
    return Statement(code=f"{_size(abs(bias), 'negligible', 'small', 'large')}_{sign}", values=values)


def is_opposed(relative: Estimate, unclipped: Estimate | None) -> bool:
    return unclipped is not None and (relative.value or 0.0) * (unclipped.value or 0.0) < 0


def _unclipped(unclipped: Estimate | None) -> Iterator[Statement]:
    if unclipped is not None and unclipped.value is not None:
        values: dict[str, Measured] = {"relative_bias": unclipped.value}
        if unclipped.low is not None and unclipped.high is not None:
            values |= {"low": unclipped.low, "high": unclipped.high}
        yield Statement(code="unclipped", values=values)


def _in_ratio(loss: Loss, figures: Mapping[str, Estimate]) -> Statement:
    found = {name: figures[name].value for name in ("mean_abs_d", "clipped") if name in figures}
    values: dict[str, Measured] = {name: value for name, value in found.items() if value is not None}
    return Statement(code="in_ratio", values=values | {"terms": _terms(loss)})


def _size(share: float, below_small: str, between: str, from_large: str) -> str:
    return below_small if share < SMALL else between if share < LARGE else from_large


def _signs(figures: Mapping[str, Estimate]) -> Iterator[Statement]:
    by_sign = {name: figures[name].value for name in ("relative_positive", "relative_negative")}
    values = {name: value for name, value in by_sign.items() if value}
    if values:
        yield Statement(code="signs", values=values)


def _where(steps: Rows) -> Iterator[Statement]:
    rows = [row for row in steps.dicts() if row["bias"] is not None]
    if len(rows) < 2:
        return
    worst = max(rows, key=lambda row: abs(row["bias"]))
    total = sum(abs(row["bias"]) for row in rows)
    values: dict[str, Measured] = {"step": worst["step"], "bias": worst["bias"]}
    if total:
        values["share"] = abs(worst["bias"]) / total
    yield Statement(code="worst_update", values=values)


def _terms(loss: Loss) -> str:
    return "tokens" if loss.level == TOKEN else "sequences"


def _flips(figures: Mapping[str, Estimate], loss: Loss) -> Iterator[Statement]:
    if "flipped" in figures:
        flipped, clipped = figures["flipped"].value or 0.0, figures["clipped"].value or 0.0
        yield Statement(code="clip_decisions", values={"flipped": flipped, "clipped": clipped, "terms": _terms(loss)})


def _correction(figures: Mapping[str, Estimate]) -> Iterator[Statement]:
    plain, applied = figures.get("uncorrected_relative_bias"), figures["relative_bias"]
    if plain is not None and plain.value is not None and applied.value is not None:
        values = {
            "relative_bias": applied.value,
            "relative_abs_bias": figures["relative_abs_bias"].value or 0.0,
            "uncorrected_relative_bias": plain.value,
            "uncorrected_relative_abs_bias": figures["uncorrected_relative_abs_bias"].value or 0.0,
        }
        yield Statement(code="correction", values=values)


def _without_bias(figures: Mapping[str, Estimate]) -> Iterator[Statement]:
    yield Statement(code="not_answerable")
    token, sequence = figures.get("mean_abs_d"), figures.get("mean_abs_sum_d")
    if token is not None and sequence is not None and token.value is not None and sequence.value is not None:
        yield Statement(code="ratios", values={"mean_abs_d": token.value, "mean_abs_sum_d": sequence.value})


def nothing_read(
    trace: str, loss: Loss, loss_basis: tuple[Statement, ...], confidence: float, steps_asked: str
) -> Objective:
    return Objective(
        trace=trace, steps_asked=steps_asked, loss=loss, loss_basis=loss_basis, passes=("train", "rollout", "current"), num_updates=0, num_rows=0,
        num_sequences=0, num_tokens=0, num_terms=0, num_nan=0, num_inf=0, num_groups=0, confidence=confidence,
        verdict_codes=(Statement(code="nothing_read"),), note_codes=(), cannot_codes=(Statement(code="no_trainer_logprobs"),),
        figures={}, steps=Rows(("step", "iteration"), []),
    )  # fmt: skip
