"""Compute a pair's statistics from totals of schemas.sums columns. A total is a scalar, or an array over resamples.

Shapes: N sequences, each with at least one finite token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
Totals = Mapping[str, Array]

_ADDABLE = (
    "num_tokens", "num_outside", "sum_d", "sum_abs_d", "sum_d2", "sum_k3", "sum_expm1_2d", "sum_prob_diff",
)  # fmt: skip


def addable(sums: Mapping[str, Array]) -> dict[str, Array]:
    """Convert the columns [N] of schemas.sums to columns [N] whose totals are the inputs to the formulas in FROM_SUMS.
    For precision, ratios are divided by the largest ratio, and the median of the sequences' means is subtracted from
    probabilities."""
    num_N, sum_d_N = sums["num_tokens"], sums["sum_d"]
    found = {name: sums[name] for name in _ADDABLE}
    with np.errstate(over="ignore", under="ignore"):
        seq_weight_N = np.exp(sum_d_N - sum_d_N.max(initial=-np.inf))
        found |= {
            "num_sequences": np.ones_like(sum_d_N), "abs_sum_d": np.abs(sum_d_N), "abs_mean_d": np.abs(sum_d_N) / num_N,
            "seq_weight": seq_weight_N, "seq_weight2": seq_weight_N**2, "expm1_2_sum_d": np.expm1(2 * sum_d_N),
        }  # fmt: skip
        scale_N = np.exp(sums["peak_d"] - sums["peak_d"].max(initial=-np.inf))
        found |= {"weight": sums["sum_weight"] * scale_N, "weight2": sums["sum_weight2"] * scale_N**2}
    if "spread_prob_a" in sums:
        off_a_N, off_b_N = (_off(sums[f"peak_{side}"], sums[f"mean_fall_{side}"]) for side in ("a", "b"))
        found |= {
            "off_a": num_N * off_a_N, "off_b": num_N * off_b_N, "off_aa": sums["spread_prob_a"] + num_N * off_a_N**2,
            "off_bb": sums["spread_prob_b"] + num_N * off_b_N**2, "off_ab": sums["spread_prob_ab"] + num_N * off_a_N * off_b_N,
        }  # fmt: skip
    return found


def _off(peak_N: Array, mean_fall_N: Array) -> Array:
    top = peak_N.max(initial=-np.inf)
    fall_N = np.expm1(peak_N - top) + np.exp(peak_N - top) * mean_fall_N
    return np.asarray(np.exp(top) * (fall_N - np.median(fall_N))) if len(fall_N) else fall_N


def pearson_of_totals(num: Array, x: Array, y: Array, xx: Array, yy: Array, xy: Array) -> Array:
    """Return Pearson's correlation from centred totals, or NaN if x or y is constant, as in SQL."""
    spread_x, spread_y = num * xx - x**2, num * yy - y**2
    known = (spread_x > 0) & (spread_y > 0)
    size = np.sqrt(np.where(known, spread_x, 1.0)) * np.sqrt(np.where(known, spread_y, 1.0))
    return np.where(known, np.clip((num * xy - x * y) / size, -1.0, 1.0), np.nan)


FROM_SUMS: dict[str, Callable[[Totals], Array]] = {
    "k1": lambda t: -t["sum_d"] / t["num_tokens"],
    "k2": lambda t: t["sum_d2"] / 2 / t["num_tokens"],
    "k3": lambda t: t["sum_k3"] / t["num_tokens"],
    "mean_abs_d": lambda t: t["sum_abs_d"] / t["num_tokens"],
    "rms_d": lambda t: np.sqrt(t["sum_d2"] / t["num_tokens"]),
    "share_outside": lambda t: t["num_outside"] / t["num_tokens"],
    "prob_diff_mean": lambda t: t["sum_prob_diff"] / t["num_tokens"],
    "prob_pearson": lambda t: pearson_of_totals(
        t["num_tokens"], t["off_a"], t["off_b"], t["off_aa"], t["off_bb"], t["off_ab"]
    ),
    "log_ppl_abs_diff_sum": lambda t: t["abs_sum_d"] / t["num_sequences"],
    "log_ppl_abs_diff_mean": lambda t: t["abs_mean_d"] / t["num_sequences"],
    "ess_token": lambda t: t["weight"] ** 2 / (t["num_tokens"] * t["weight2"]),
    "ess_sequence": lambda t: t["seq_weight"] ** 2 / (t["num_sequences"] * t["seq_weight2"]),
    "chi2_token": lambda t: t["sum_expm1_2d"] / t["num_tokens"],
    "chi2_sequence": lambda t: t["expm1_2_sum_d"] / t["num_sequences"],
}
"""Column of `stats` -> its formula, given the totals of the columns from `addable`. The formulas match those in
sql/statistics.sql."""
