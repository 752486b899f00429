"""What the statistics of a run need of each of its sequences, so that resampling these costs a product of matrices.

Shapes: N sequences, C columns of sums, R resamples.
"""

from __future__ import annotations

import numpy as np

from ..database import Database
from ..pairs import quoted_pair
from ..source import Pair
from ..totals import Array

_SUMMED = (
    "num_tokens", "sum_d", "sum_abs_d", "sum_d2", "sum_k3", "sum_expm1_d", "sum_expm1_2d", "num_outside", "sum_prob_diff",
    "sum_prob_a", "sum_prob_b", "sum_prob_a2", "sum_prob_b2", "sum_prob_ab",
)  # fmt: skip
_LARGEST = ("max_abs_d", "max_prob_diff")


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
