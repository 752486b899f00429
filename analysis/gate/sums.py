"""What the statistics of a run need of each of its sequences, so that resampling these costs a product of matrices.

Shapes: N sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..statistics.estimators import Array, addable
from ..statistics.intervals import unit
from ..trace.connection import quoted_pair
from ..trace.database import Database
from ..trace.pair_sums import OF_DIFFERENCES, OF_PROBABILITIES
from ..trace.source import Pair

LARGEST = {"max_abs_d": "max_abs_d", "prob_diff_max": "max_prob_diff"}
"""Column of `stats` that is a largest value -> the largest value of each sequence."""

MOST_NULL = 0.5
"""Share of the tokens that count without a logprob of both passes, above which a number says nothing of the run."""

QUANTILES = {"p50_abs_d": 0.5, "p95_abs_d": 0.95, "p99_abs_d": 0.99}
"""Column of `stats` that is a quantile of |d| -> its probability."""

COUNTS = ("num_sequences", "num_tokens", "num_nan", "num_inf")
"""Columns of `stats` without an interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceColumns:
    """What the statistics need of each sequence that has a token to compare."""

    values: dict[str, Array]
    """[N] columns that add up to the totals of FROM_SUMS."""
    largest: dict[str, Array]
    """[N] the largest values of LARGEST."""
    unit_N: np.ndarray
    """A number for each group."""

    @classmethod
    def of_sums(cls, sums: dict[str, Array], unit_N: np.ndarray) -> SequenceColumns:
        """From [N] columns of schemas.sums."""
        return cls(values=addable(sums), largest={name: sums[name] for name in LARGEST.values()}, unit_N=unit_N)

    @classmethod
    def read(cls, database: Database, pair: Pair) -> SequenceColumns:
        """Of a pair of a trace."""
        names = ("num_tokens", *OF_DIFFERENCES, *OF_PROBABILITIES)
        query = f"""
            SELECT {", ".join(names)}, {unit("s")} AS unit
            FROM pair_sums({quoted_pair(pair)}) AS sums JOIN sequences AS s USING (run, step, seq_id)
            WHERE sum_d IS NOT NULL ORDER BY sums.run, sums.step, sums.seq_id, iteration_a, iteration_b
        """
        found = database.connection.execute(query).fetchnumpy()
        sums = {name: np.asarray(found[name], dtype=np.float64) for name in names}
        return cls.of_sums(sums, np.asarray(found["unit"]))

    def __len__(self) -> int:
        return len(self.unit_N)


_LEFT_OUT = """
    SELECT sum(num_tokens), sum(num_nan), sum(num_inf), sum(num_counted)
    FROM pair_sums({pair}) JOIN (
        SELECT run, step, seq_id, CASE WHEN response_mask IS NULL THEN num_response_tokens
                                       ELSE coalesce(list_sum(response_mask::INTEGER[]), 0) END AS num_counted
        FROM sequences
    ) USING (run, step, seq_id)
"""


def left_out(database: Database, pair: Pair) -> str:
    """Say what the numbers of a pair leave out: any NaN or infinity, or NULL on most tokens that count; empty where nothing."""
    counts = database.connection.execute(_LEFT_OUT.format(pair=quoted_pair(pair))).fetchall()[0]
    num_finite, num_nan, num_inf, num_counted = (int(count or 0) for count in counts)
    parts = [f"{count:,} are {what}" for count, what in ((num_nan, "NaN"), (num_inf, "infinite")) if count]
    num_null = num_counted - num_finite - num_nan - num_inf
    if num_null > MOST_NULL * num_counted:
        parts.append(f"{num_null:,} have no logprob of both passes")
    return f"of {num_counted:,} tokens that count {' and '.join(parts)}: they are left out" if parts else ""
