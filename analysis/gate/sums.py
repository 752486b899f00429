"""Per-sequence columns of a run's statistics, so that resampling sequences is a matrix product.

Shapes: N sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..statistics.estimators import Array, addable
from ..statistics.intervals import numbered, student_quantile, unit
from ..trace.database import Database
from ..trace.macros import quoted_pair
from ..trace.pair_sums import OF_DIFFERENCES, OF_PROBABILITIES
from ..trace.source import Pair

LARGEST = {"max_abs_d": "max_abs_d", "prob_diff_max": "max_prob_diff"}
"""Column of `stats` that is a maximum -> the column with the maximum of each sequence."""

MOST_NULL = 0.5
"""Maximum share of counted tokens that lack a logprob in one of the passes; above it a number does not represent the
run."""

QUANTILES = {"p50_abs_d": 0.5, "p95_abs_d": 0.95, "p99_abs_d": 0.99}
"""Column of `stats` that is a quantile of |d| -> its probability."""

COUNTS = ("num_sequences", "num_tokens", "num_nan", "num_inf")
"""Columns of `stats` without an interval."""


def is_count(metric: str) -> bool:
    """Return True for a count, such as `num_tokens`, which grows with the number of steps."""
    return metric.rsplit("/", 1)[-1].startswith("num_")


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceColumns:
    """Columns of the statistics, with one element per sequence that has a comparable token."""

    values: dict[str, Array]
    """Name -> [N] column; the statistics follow from the totals of these columns."""
    largest: dict[str, Array]
    """Column named in the values of LARGEST -> [N] maximum of each sequence."""
    unit_N: np.ndarray
    """[N] index of the group that each sequence belongs to."""

    @classmethod
    def of_sums(cls, sums: dict[str, Array], unit_N: np.ndarray) -> SequenceColumns:
        """Build the columns from [N] columns of schemas.sums."""
        return cls(values=addable(sums), largest={name: sums[name] for name in LARGEST.values()}, unit_N=unit_N)

    @classmethod
    def read(cls, database: Database, pair: Pair) -> SequenceColumns:
        """Read the columns of a pair of passes from a trace."""
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

    def reach(self) -> float:
        """Return the size of a sequence's log ratio, sqrt(sum of d^2) in nats, that a new sequence exceeds with a
        probability of 1 in 1,000.

        It is extrapolated from a lognormal fit, because the sequences that dominate exp(sum of d) are rare. The
        quantile is Student's with groups - 1 degrees of freedom, so it is larger if there are few groups.
        """
        squares, num_groups = self.values["sum_d2"], numbered(self.unit_N)[1]
        logs = np.log(squares[squares > 0]) / 2
        if len(logs) < 2 or num_groups < 2:
            return 0.0
        beyond = student_quantile(0.999, num_groups - 1) * np.sqrt(1 + 1 / num_groups)
        return float(np.exp(logs.mean() + beyond * logs.std(ddof=1)))


_LEFT_OUT = """
    SELECT sum(num_tokens), sum(num_nan), sum(num_inf), sum(num_counted)
    FROM pair_sums({pair}) JOIN (
        SELECT run, step, seq_id, CASE WHEN response_mask IS NULL THEN num_response_tokens
                                       ELSE coalesce(list_sum(response_mask::INTEGER[]), 0) END AS num_counted
        FROM sequences
    ) USING (run, step, seq_id)
"""


def left_out(database: Database, pair: Pair) -> str:
    """Return a sentence on the tokens that the numbers of a pair exclude: tokens with NaN or infinity, or, if they are
    the majority, tokens without a logprob; empty if there are none.
    """
    counts = database.connection.execute(_LEFT_OUT.format(pair=quoted_pair(pair))).fetchall()[0]
    num_finite, num_nan, num_inf, num_counted = (int(count or 0) for count in counts)
    parts = [f"{count:,} are {what}" for count, what in ((num_nan, "NaN"), (num_inf, "infinite")) if count]
    num_null = num_counted - num_finite - num_nan - num_inf
    if num_null > MOST_NULL * num_counted:
        parts.append(f"{num_null:,} have no logprob in one of the passes")
    return f"of {num_counted:,} tokens in the loss, {' and '.join(parts)}; they are left out" if parts else ""
