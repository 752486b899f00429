"""Statistics of a pair from totals of the sums in schemas.sums: one value each, or arrays of resamples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]
Totals = Mapping[str, Array]


def _pearson(t: Totals) -> Array:
    n = t["num_tokens"]
    covariance = n * t["sum_prob_ab"] - t["sum_prob_a"] * t["sum_prob_b"]
    spread_a, spread_b = n * t["sum_prob_a2"] - t["sum_prob_a"] ** 2, n * t["sum_prob_b2"] - t["sum_prob_b"] ** 2
    # No spread, or a negative one by rounding, is no correlation, as in SQL.
    known = (spread_a > 0) & (spread_b > 0)
    return np.where(known, covariance / np.sqrt(np.where(known, spread_a * spread_b, 1.0)), np.nan)


FROM_SUMS: dict[str, Callable[[Totals], Array]] = {
    "k1": lambda t: -t["sum_d"] / t["num_tokens"],
    "k2": lambda t: t["sum_d2"] / 2 / t["num_tokens"],
    "k3": lambda t: t["sum_k3"] / t["num_tokens"],
    "mean_abs_d": lambda t: t["sum_abs_d"] / t["num_tokens"],
    "rms_d": lambda t: np.sqrt(t["sum_d2"] / t["num_tokens"]),
    "share_outside": lambda t: t["num_outside"] / t["num_tokens"],
    "prob_diff_mean": lambda t: t["sum_prob_diff"] / t["num_tokens"],
    "prob_pearson": _pearson,
    "log_ppl_abs_diff_sum": lambda t: t["abs_sum_d"] / t["num_sequences"],
    "log_ppl_abs_diff_mean": lambda t: t["abs_mean_d"] / t["num_sequences"],
    "ess_token": lambda t: (
        (t["num_tokens"] + t["sum_expm1_d"]) ** 2 / (t["num_tokens"] * (t["num_tokens"] + t["sum_expm1_2d"]))
    ),
    "ess_sequence": lambda t: t["weight"] ** 2 / (t["num_sequences"] * t["weight2"]),
    "chi2_token": lambda t: t["sum_expm1_2d"] / t["num_tokens"],
    "chi2_sequence": lambda t: t["expm1_2_sum_d"] / t["num_sequences"],
}
"""Column of `stats` -> how it follows from totals over sequences. The formulas are those of sql/statistics.sql."""
