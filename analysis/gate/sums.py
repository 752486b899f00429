"""Statistics of a run from the sums of its sequences, so that resampling these costs a product of matrices.

Shapes: N sequences, C columns of sums, R resamples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..database import Database
from ..pairs import quoted_pair
from ..source import Pair

Array = np.ndarray[Any, np.dtype[np.float64]]
Totals = Mapping[str, Array]

_SUMMED = (
    "num_tokens", "sum_d", "sum_abs_d", "sum_d2", "sum_k3", "sum_expm1_d", "sum_expm1_2d", "num_outside", "sum_prob_diff",
    "sum_prob_a", "sum_prob_b", "sum_prob_a2", "sum_prob_b2", "sum_prob_ab",
)  # fmt: skip
_LARGEST = ("max_abs_d", "max_prob_diff")


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

LARGEST = {"max_abs_d": "max_abs_d", "prob_diff_max": "max_prob_diff"}
"""Column of `stats` that is a largest value -> the largest value of each sequence."""

QUANTILES = {"p50_abs_d": 0.5, "p95_abs_d": 0.95, "p99_abs_d": 0.99}
"""Column of `stats` that is a quantile of |d| -> its probability."""

COUNTS = ("num_sequences", "num_tokens", "num_nan", "num_inf")
"""Columns of `stats` that are what they are."""


class SequenceColumns:
    """What the statistics need of each sequence that has a token to compare."""

    def __init__(self, database: Database, pair: Pair):
        query = f"""
            SELECT {", ".join((*_SUMMED, *_LARGEST))} FROM pair_sums({quoted_pair(pair)})
            WHERE sum_d IS NOT NULL ORDER BY run, step, seq_id, iteration_a, iteration_b
        """
        found = database.connection.execute(query).fetchnumpy()
        values = {name: np.asarray(column, dtype=np.float64) for name, column in found.items()}
        self.largest = {name: values.pop(name) for name in _LARGEST}
        sum_d, num_tokens = values["sum_d"], values["num_tokens"]
        peak = sum_d.max(initial=-np.inf)
        with np.errstate(over="ignore"):
            self.values: dict[str, Array] = values | {
                "num_sequences": np.ones_like(sum_d),
                "abs_sum_d": np.abs(sum_d),
                "abs_mean_d": np.abs(sum_d) / num_tokens,
                "weight": np.exp(sum_d - peak),
                "weight2": np.exp(2 * (sum_d - peak)),
                "expm1_2_sum_d": np.expm1(2 * sum_d),
            }

    def __len__(self) -> int:
        return len(self.values["sum_d"])
