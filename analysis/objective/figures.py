"""The figures of an objective from totals over sequences: one value each, or arrays of updates or of resamples.

Shapes: N sequences, U updates (step and inner iteration).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...schemas.loss import SAPO, VESPO, Loss
from ..totals import Array, Totals
from .loss_terms import SIDES
from .sides import ADVANTAGE, DRIFT, MISMATCH
from .sums import Sums
from .terms import SAFETY_BOUND


@dataclass(frozen=True, slots=True)
class Figure:
    """How a figure follows from totals, and what it says."""

    value: Callable[[Totals], Array]
    meaning: str
    needs: frozenset[str] = frozenset({MISMATCH, ADVANTAGE})
    """Of what the trace answers: see sides."""
    of_correction: bool = False
    """Whether it says something only where the loss has a correction."""


def _of(name: str) -> Callable[[Totals], Array]:
    return lambda t: t[f"w_{name}_positive"] + t[f"w_{name}_negative"]


def _over(above: Callable[[Totals], Array], below: Callable[[Totals], Array]) -> Callable[[Totals], Array]:
    return lambda t: above(t) / below(t)


def _per_update(value: Callable[[Totals], Array]) -> Callable[[Totals], Array]:
    return lambda t: value(t) / t["num_updates"]


def _column(name: str) -> Callable[[Totals], Array]:
    return lambda t: t[name]


def _share(*names: str) -> Callable[[Totals], Array]:
    return lambda t: sum((t[name] for name in names), np.zeros(())) / t["terms_known"]


def _mean(name: str, by: str = "num_tokens") -> Callable[[Totals], Array]:
    return lambda t: t[name] / t[by]


def _covariance(product: str, left: str, right: str, by: str) -> Callable[[Totals], Array]:
    return lambda t: t[product] / t[by] - t[left] / t[by] * (t[right] / t[by])


def _correlation(t: Totals) -> Array:
    n = t["terms_known"]
    spread = (n * t["sum_weighed2"] - t["sum_weighed"] ** 2) * (n * t["sum_gap2"] - t["sum_gap"] ** 2)
    known = spread > 0
    return np.where(
        known,
        (n * t["sum_weighed_gap"] - t["sum_weighed"] * t["sum_gap"]) / np.sqrt(np.where(known, spread, 1.0)),
        np.nan,
    )


def _total_variance(t: Totals) -> Array:
    n = t["num_tokens"]
    squares = t["sum_d2"] + 2 * t["sum_d_drift"] + t["sum_drift2"]
    return squares / n - ((t["sum_d"] + t["sum_drift"]) / n) ** 2


def _clipped_used(t: Totals) -> Array:
    return sum(
        (t[f"clipped_{side}"] + t[f"to_clipped_{side}"] - t[f"to_free_{side}"] for side in SIDES),
        np.zeros(()),
    )


def _to_clipped(t: Totals) -> Array:
    return t["to_clipped_positive"] + t["to_clipped_negative"]


_FLIPS = ("to_clipped_positive", "to_clipped_negative", "to_free_positive", "to_free_negative")
_BOTH = frozenset({MISMATCH, DRIFT})
CLIP = "clip"
"""What a figure needs that says something only of a loss that clips."""
LINEAR = "linear"
"""What one needs that says something only where f is rho A but for a clip."""
_CLIPPED = frozenset({MISMATCH, ADVANTAGE, CLIP})

FIGURES: Mapping[str, Figure] = {
    "bias": Figure(_per_update(_of("applied")), "sum b of an update, weighed as the loss weighs its tokens: by how much the mismatch lifts the objective"),
    "bias_positive": Figure(_per_update(_column("w_applied_positive")), "of tokens with A > 0"),
    "bias_negative": Figure(_per_update(_column("w_applied_negative")), "of tokens with A < 0"),
    "abs_bias": Figure(_per_update(_of("abs_applied")), "sum |b|: what it would be if no two cancelled"),
    "skew": Figure(_over(_of("applied"), _of("abs_applied")), "sum b / sum |b|: 0 is noise, -1 or 1 a push one way"),
    "size": Figure(_per_update(_of("size")), "sum |f(rho*)|, what the others are held against"),
    "used": Figure(_per_update(_of("used")), "sum w f(rho_used), weighed alike: minus the policy part of the loss; of cispo and vespo f is the weight on grad log p"),
    "relative_bias": Figure(_over(_of("applied"), _of("size")), "sum b / sum |f(rho*)|"),
    "relative_abs_bias": Figure(_over(_of("abs_applied"), _of("size")), "sum |b| / sum |f(rho*)|"),
    "relative_positive": Figure(_over(_column("w_applied_positive"), _column("w_size_positive")), "sum b / sum |f(rho*)| of A > 0: above 0, they are credited too much"),
    "relative_negative": Figure(_over(_column("w_applied_negative"), _column("w_size_negative")), "sum b / sum |f(rho*)| of A < 0: below 0, they are punished too much"),
    "uncorrected_bias": Figure(_per_update(_of("plain")), "bias with the weights of the loss's correction left out", of_correction=True),
    "uncorrected_abs_bias": Figure(_per_update(_of("abs_plain")), "abs_bias without them", of_correction=True),
    "uncorrected_skew": Figure(_over(_of("plain"), _of("abs_plain")), "skew without them", of_correction=True),
    "uncorrected_relative_bias": Figure(_over(_of("plain"), _of("size")), "relative_bias without them", of_correction=True),
    "uncorrected_relative_abs_bias": Figure(_over(_of("abs_plain"), _of("size")), "relative_abs_bias without them", of_correction=True),
    "clipped": Figure(lambda t: _clipped_used(t) / t["terms_known"], "share of the terms that the loss clips", frozenset({ADVANTAGE, CLIP})),
    "clipped_true": Figure(_share("clipped_positive", "clipped_negative"), "share that it would clip under rho*", _CLIPPED),
    "flipped": Figure(_share(*_FLIPS), "share whose clip decision the mismatch turns", _CLIPPED),
    "to_clipped_positive": Figure(_share("to_clipped_positive"), "share clipped under the used ratio alone, A > 0", _CLIPPED),
    "to_clipped_negative": Figure(_share("to_clipped_negative"), "the same, A < 0", _CLIPPED),
    "to_free_positive": Figure(_share("to_free_positive"), "share clipped under rho* alone, A > 0", _CLIPPED),
    "to_free_negative": Figure(_share("to_free_negative"), "the same, A < 0", _CLIPPED),
    "clipped_by_mismatch": Figure(lambda t: _to_clipped(t) / _clipped_used(t), "share of what is clipped that rho* would leave", _CLIPPED),
    "cov_weighed_d": Figure(_covariance("sum_weighed_gap", "sum_weighed", "sum_gap", "terms_known"), "cov(A rho*, d), nats times the advantage's unit"),
    "corr_weighed_d": Figure(_correlation, "the same as a correlation"),
    "first_order": Figure(lambda t: -t["sum_weighed_gap"] / t["terms_known"], "-mean(A rho* d): the mean of b to first order, where nothing is clipped", frozenset({MISMATCH, ADVANTAGE, LINEAR})),
    "bad_updates": Figure(_mean("num_bad"), "share of tokens with A < 0 and p(rollout) - p(current) >= 0.5"),
    "bad_updates_mismatch": Figure(_mean("num_bad_mismatch"), "the same with p(train): the mismatch alone does it"),
    "mean_d": Figure(_mean("sum_d"), "mean of d = train - rollout, nats", frozenset({MISMATCH})),
    "mean_abs_d": Figure(_mean("sum_abs_d"), "mean of |d|, nats", frozenset({MISMATCH})),
    "var_d": Figure(_covariance("sum_d2", "sum_d", "sum_d", "num_tokens"), "variance of the mismatch d, nats squared", frozenset({MISMATCH})),
    "mean_drift": Figure(_mean("sum_drift"), "mean of the policy drift = current - train, nats", frozenset({DRIFT})),
    "var_drift": Figure(_covariance("sum_drift2", "sum_drift", "sum_drift", "num_tokens"), "variance of the policy drift", frozenset({DRIFT})),
    "cov_d_drift": Figure(_covariance("sum_d_drift", "sum_d", "sum_drift", "num_tokens"), "their covariance", _BOTH),
    "var_total": Figure(_total_variance, "variance of ln rho* = d + drift: the two and twice their covariance", frozenset({MISMATCH})),
    "share_mismatch": Figure(lambda t: t["sum_d2"] / (t["sum_d2"] + t["sum_drift2"]), "mean d^2 by mean d^2 + mean drift^2", _BOTH),
    "mean_sum_d": Figure(_mean("total_d", "num_sequences"), "mean over sequences of the sum of d, nats", frozenset({MISMATCH})),
    "mean_abs_sum_d": Figure(_mean("abs_total_d", "num_sequences"), "mean over sequences of its size, nats", frozenset({MISMATCH})),
    "sequence_proxy": Figure(_mean("proxy", "sequences_known"), "mean over sequences of (exp(sum d) - 1) A: REINFORCE's gradient is off by it, with every gradient alike"),
    "abs_sequence_proxy": Figure(_mean("abs_proxy", "sequences_known"), "mean of its size"),
}  # fmt: skip
"""Name of a figure -> how it follows from totals. The formulas are those of arXiv 2605.14220, 2602.04879 (bad updates) and
2512.01374 (mismatch and drift)."""


def chosen_figures(loss: Loss, known: frozenset[str]) -> dict[str, Figure]:
    """The figures that a trace answers for a loss."""
    corrected = loss.correction != "none"
    known = known | {CLIP} if loss.has_clip else known
    known = known if loss.kind in (SAPO, VESPO) else known | {LINEAR}
    return {
        name: each for name, each in FIGURES.items() if each.needs <= known and (corrected or not each.of_correction)
    }


def totals_of(sums: Sums) -> dict[str, Array]:
    """[N] columns that are added up to totals."""
    columns = dict(sums.columns)
    sum_d_N = columns["sum_d"]
    for name in ("size", "used", "plain", "abs_plain", "applied", "abs_applied"):
        for side in SIDES:
            columns[f"w_{name}_{side}"] = sums.share_N * columns.pop(f"{name}_{side}")
    proxy_N = np.expm1(np.minimum(sum_d_N, SAFETY_BOUND)) * columns["advantage"]
    return columns | {
        "num_sequences": (columns["num_tokens"] > 0).astype(np.float64),
        "sequences_known": (columns["terms_known"] > 0).astype(np.float64), "total_d": sum_d_N,
        "abs_total_d": np.abs(sum_d_N), "proxy": proxy_N, "abs_proxy": np.abs(proxy_N),
    }  # fmt: skip


def values_of(figures: Mapping[str, Figure], totals: Totals) -> dict[str, Array]:
    """Name -> the figure for each element of the totals; NaN where there is nothing to divide by."""
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        return {name: np.asarray(each.value(totals), np.float64) for name, each in figures.items()}


def summed(columns: Mapping[str, Array], places: np.ndarray, number: int) -> dict[str, Array]:
    """Columns added up by place: [N] -> [number]."""
    found = {name: np.bincount(places, values, minlength=number) for name, values in columns.items()}
    return {name: values.astype(np.float64) for name, values in found.items()}


def as_float(value: Any) -> float | None:
    """A number; None for NaN."""
    return None if np.isnan(value) else float(value)
