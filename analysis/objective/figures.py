"""Formulas for an objective's figures, computed from totals over sequences.

A total is a number, or has one element per update or resample. Shapes: N sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import itemgetter

import numpy as np

from ...schemas.loss import Loss
from ..statistics.estimators import Array, Totals
from ..statistics.loss import SAFETY_BOUND
from ..statistics.moments import off_median
from .loss_terms import SIDES
from .pass_roles import ADVANTAGE, DRIFT, MISMATCH
from .sums import SequenceSums


@dataclass(frozen=True, slots=True)
class FigureFormula:
    value: Callable[[Totals], Array]
    meaning: str
    needs: frozenset[str] = frozenset({MISMATCH, ADVANTAGE})
    """Data that the figure needs: MISMATCH, DRIFT or ADVANTAGE, plus CLIP if the figure requires a loss that clips."""
    of_correction: bool = False
    """True if the figure is defined only for a loss with a correction."""
    bounds: tuple[float, float] = (-math.inf, math.inf)
    in_tails: float | None = None
    """Measured coverage of the 95% interval if a few tokens dominate, or None if the coverage is at least 90%. See
    benchmarks/coverage.py and docs/evidence/intervals.md."""

    @property
    def description(self) -> str:
        if self.in_tails is None:
            return self.meaning
        return f"{self.meaning}; if a few tokens dominate, 95% intervals contain the true value in {self.in_tails:.0%} of runs"


def _of(name: str) -> Callable[[Totals], Array]:
    return lambda t: t[f"w_{name}_positive"] + t[f"w_{name}_negative"]


def _over(above: Callable[[Totals], Array], below: Callable[[Totals], Array]) -> Callable[[Totals], Array]:
    return lambda t: above(t) / below(t)


def _per_update(value: Callable[[Totals], Array]) -> Callable[[Totals], Array]:
    return lambda t: value(t) / t["num_updates"]


def _share(*names: str) -> Callable[[Totals], Array]:
    return lambda t: sum((t[name] for name in names), np.zeros(())) / t["terms_known"]


def _mean(name: str, by: str = "num_tokens") -> Callable[[Totals], Array]:
    return lambda t: t[name] / t[by]


def _covariance(product: str, left: str, right: str) -> Callable[[Totals], Array]:
    """Return a formula for the covariance of two values, given the names of their totals. To avoid cancellation, the
    values must be centred near their means before they are summed."""
    return lambda t: t[product] / t["num_tokens"] - t[left] / t["num_tokens"] * (t[right] / t["num_tokens"])


def _variance(name: str) -> Callable[[Totals], Array]:
    of = _covariance(f"off_{name}2", f"off_{name}", f"off_{name}")
    return lambda t: np.maximum(of(t), 0.0)


def _total_variance(t: Totals) -> Array:
    n = t["num_tokens"]
    squares = t["off_d2"] + 2 * t["off_d_drift"] + t["off_drift2"]
    return np.maximum(squares / n - ((t["off_d"] + t["off_drift"]) / n) ** 2, 0.0)


def _clipped_used(t: Totals) -> Array:
    return sum((t[f"clipped_{side}"] + t[f"to_clipped_{side}"] - t[f"to_free_{side}"] for side in SIDES), np.zeros(()))


_FLIPS = ("to_clipped_positive", "to_clipped_negative", "to_free_positive", "to_free_negative")
_BOTH = frozenset({MISMATCH, DRIFT})
CLIP = "clip"
_CLIPPED = frozenset({MISMATCH, ADVANTAGE, CLIP})

_SIZE, _SHARE, _SIGNED = (0.0, math.inf), (0.0, 1.0), (-1.0, 1.0)

FIGURES: Mapping[str, FigureFormula] = {
    "bias": FigureFormula(_per_update(_of("applied")), "sum b per update, with the loss's token weights: how much the mismatch raises the objective"),
    "bias_positive": FigureFormula(_per_update(itemgetter("w_applied_positive")), "bias from tokens with A > 0"),
    "bias_negative": FigureFormula(_per_update(itemgetter("w_applied_negative")), "bias from tokens with A < 0"),
    "abs_bias": FigureFormula(_per_update(_of("abs_applied")), "sum |b|: the bias if no terms cancelled", bounds=_SIZE),
    "skew": FigureFormula(_over(_of("applied"), _of("abs_applied")), "sum b / sum |b|: 0 if b is pure noise, -1 or 1 if it is one-sided", bounds=_SIGNED),
    "size": FigureFormula(_per_update(_of("size")), "sum |f(rho*)|: the objective's size, used as the divisor for relative figures", bounds=_SIZE),
    "used": FigureFormula(_per_update(_of("used")), "sum w f(rho_used), with the loss's token weights: the loss's policy "
    "term, negated. For cispo and vespo, f is the weight on grad log p"),
    "relative_bias": FigureFormula(_over(_of("applied"), _of("size")), "sum b / sum |f(rho*)|"),
    "relative_abs_bias": FigureFormula(_over(_of("abs_applied"), _of("size")), "sum |b| / sum |f(rho*)|", bounds=_SIZE),
    "relative_positive": FigureFormula(_over(itemgetter("w_applied_positive"), itemgetter("w_size_positive")), "sum b / sum |f(rho*)| over A > 0; if positive, these tokens are reinforced too strongly"),
    "relative_negative": FigureFormula(_over(itemgetter("w_applied_negative"), itemgetter("w_size_negative")), "sum b / sum |f(rho*)| over A < 0; if negative, these tokens are penalised too strongly"),
    "unclipped_bias": FigureFormula(_per_update(_of("unclipped")), "sum A (w rho_used - rho*): the bias without the clip", _CLIPPED),
    "unclipped_relative_bias": FigureFormula(_over(_of("unclipped"), _of("size")), "unclipped_bias / sum |f(rho*)|; "
    "below relative_bias if only f(rho*) is clipped", _CLIPPED),
    "uncorrected_bias": FigureFormula(_per_update(_of("plain")), "bias without the loss's correction weights", of_correction=True),
    "uncorrected_abs_bias": FigureFormula(_per_update(_of("abs_plain")), "abs_bias without the loss's correction weights", of_correction=True, bounds=_SIZE),
    "uncorrected_skew": FigureFormula(_over(_of("plain"), _of("abs_plain")), "skew without the loss's correction weights", of_correction=True, bounds=_SIGNED),
    "uncorrected_relative_bias": FigureFormula(_over(_of("plain"), _of("size")), "relative_bias without the loss's correction weights", of_correction=True),
    "uncorrected_relative_abs_bias": FigureFormula(_over(_of("abs_plain"), _of("size")), "relative_abs_bias without the loss's correction weights", of_correction=True, bounds=_SIZE),
    "clipped": FigureFormula(lambda t: _clipped_used(t) / t["terms_known"], "share of terms that the loss clips", frozenset({ADVANTAGE, CLIP}), bounds=_SHARE),
    "clipped_true": FigureFormula(_share("clipped_positive", "clipped_negative"), "share of terms that the loss "
    "would clip under rho*", _CLIPPED, bounds=_SHARE),
    "flipped": FigureFormula(_share(*_FLIPS), "share of terms for which the mismatch flips the clip decision", _CLIPPED, bounds=_SHARE),
    "to_clipped_positive": FigureFormula(_share("to_clipped_positive"), "share of terms with A > 0 that are clipped only under the used ratio", _CLIPPED, bounds=_SHARE),
    "to_clipped_negative": FigureFormula(_share("to_clipped_negative"), "share of terms with A < 0 that are clipped only under the used ratio", _CLIPPED, bounds=_SHARE),
    "to_free_positive": FigureFormula(_share("to_free_positive"), "share of terms with A > 0 that are clipped only under rho*", _CLIPPED, bounds=_SHARE),
    "to_free_negative": FigureFormula(_share("to_free_negative"), "share of terms with A < 0 that are clipped only under rho*", _CLIPPED, bounds=_SHARE),
    "clipped_by_mismatch": FigureFormula(lambda t: (t["to_clipped_positive"] + t["to_clipped_negative"]) / _clipped_used(t), "share of clipped terms that rho* would not clip", _CLIPPED, bounds=_SHARE),
    "bad_updates": FigureFormula(_mean("num_bad"), "share of tokens with A < 0 and p(rollout) - p(current) >= 0.5", bounds=_SHARE),
    "bad_updates_mismatch": FigureFormula(_mean("num_bad_mismatch"), "bad_updates with p(train) instead of p(current): bad "
    "updates due to the mismatch alone", bounds=_SHARE),
    "mean_d": FigureFormula(_mean("sum_d"), "mean d = train - rollout (nats)", frozenset({MISMATCH})),
    "mean_abs_d": FigureFormula(_mean("sum_abs_d"), "mean |d| (nats)", frozenset({MISMATCH}), bounds=_SIZE),
    "var_d": FigureFormula(_variance("d"), "variance of the mismatch d (nats squared)", frozenset({MISMATCH}), bounds=_SIZE, in_tails=0.86),
    "mean_drift": FigureFormula(_mean("sum_drift"), "mean policy drift = current - train (nats)", frozenset({DRIFT})),
    "var_drift": FigureFormula(_variance("drift"), "variance of the policy drift (nats squared)", frozenset({DRIFT}), bounds=_SIZE),
    "cov_d_drift": FigureFormula(_covariance("off_d_drift", "off_d", "off_drift"), "covariance between d and drift (nats squared)", _BOTH),
    "var_total": FigureFormula(_total_variance, "variance of ln rho* = d + drift, i.e. both variances plus twice the covariance (nats squared)", frozenset({MISMATCH}), bounds=_SIZE, in_tails=0.87),
    "share_mismatch": FigureFormula(lambda t: t["sum_d2"] / (t["sum_d2"] + t["sum_drift2"]), "mean d^2 / (mean d^2 + mean drift^2)", _BOTH, bounds=_SHARE, in_tails=0.85),
    "mean_sum_d": FigureFormula(_mean("total_d", "num_sequences"), "sum d per sequence, averaged over sequences (nats)", frozenset({MISMATCH})),
    "mean_abs_sum_d": FigureFormula(_mean("abs_total_d", "num_sequences"), "|sum d| per sequence, averaged over sequences (nats)", frozenset({MISMATCH}), bounds=_SIZE),
    "sequence_proxy": FigureFormula(_mean("proxy", "sequences_known"), "(exp(sum d) - 1) A, averaged over sequences: the error in REINFORCE's gradient if all sequences had the same gradient"),
    "abs_sequence_proxy": FigureFormula(_mean("abs_proxy", "sequences_known"), "|(exp(sum d) - 1) A|, averaged over sequences", bounds=_SIZE),
}  # fmt: skip
"""The formulas are from arXiv 2605.14220, 2602.04879 (bad updates) and 2512.01374 (mismatch and drift)."""


def chosen_figures(loss: Loss, known: frozenset[str]) -> dict[str, FigureFormula]:
    """Return the figures that are defined for this loss and can be computed from the data in `known`."""
    corrected = loss.correction != "none"
    known = known | {CLIP} if loss.has_clip else known
    return {
        name: each for name, each in FIGURES.items() if each.needs <= known and (corrected or not each.of_correction)
    }


def totals_of(sums: SequenceSums, place_N: np.ndarray | None = None) -> dict[str, Array]:
    """Return the [N] columns whose totals the formulas need.

    To avoid cancellation, squares and products are centred on the median of the sequence means. The median is taken
    over each group in `place_N`, or over the whole run if `place_N` is None.
    """
    columns = dict(sums.columns)
    place_N = np.zeros_like(sums.update_N) if place_N is None else place_N
    columns |= _around(columns, place_N)
    sum_d_N = columns["sum_d"]
    for name in ("size", "used", "plain", "abs_plain", "applied", "abs_applied", "unclipped"):
        for side in SIDES:
            columns[f"w_{name}_{side}"] = sums.share_N * columns.pop(f"{name}_{side}")
    proxy_N = np.expm1(np.minimum(sum_d_N, SAFETY_BOUND)) * columns["advantage"]
    return columns | {
        "num_sequences": (columns["num_tokens"] > 0).astype(np.float64),
        "sequences_known": (columns["terms_known"] > 0).astype(np.float64), "total_d": sum_d_N,
        "abs_total_d": np.abs(sum_d_N), "proxy": proxy_N, "abs_proxy": np.abs(proxy_N),
    }  # fmt: skip


def _around(columns: Mapping[str, Array], place_N: np.ndarray) -> dict[str, Array]:
    num_N = columns["num_tokens"]
    off = {name: off_median(columns[f"mean_{name}"], num_N, place_N) for name in ("d", "drift")}
    found = {f"off_{name}": num_N * off_N for name, off_N in off.items()}
    for name, off_N in off.items():
        found[f"off_{name}2"] = columns[f"spread_{name}"] + num_N * off_N**2
    return found | {"off_d_drift": columns["spread_d_drift"] + num_N * off["d"] * off["drift"]}


def values_of(figures: Mapping[str, FigureFormula], totals: Totals) -> dict[str, Array]:
    """Evaluate the figures. A figure is NaN where its divisor is 0."""
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        return {name: np.asarray(each.value(totals), np.float64) for name, each in figures.items()}


def summed(columns: Mapping[str, Array], places: np.ndarray, number: int) -> dict[str, Array]:
    return {name: np.bincount(places, of_N, minlength=number).astype(np.float64) for name, of_N in columns.items()}


def as_float(value: float | Array) -> float | None:
    return None if np.isnan(value) else float(value)
