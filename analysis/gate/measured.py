"""Measure numbers of a run, with confidence intervals over groups of sequences."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from ...schemas.errors import NothingToCompare
from ...tracer.arrow_arrays import number_array
from ...tracer.progress import Progress
from ..frameworks.framework import read_once
from ..frameworks.registry import framework_of
from ..rows import Rows
from ..statistics.estimators import FROM_SUMS, Array, Totals
from ..statistics.intervals import (
    Interval,
    NoInterval,
    bootstrap,
    jackknife,
    largest_interval,
    numbered,
    parts_of,
    unit,
)
from ..stats import stats
from ..trace.database import Database
from ..trace.macros import quoted_pair
from ..trace.pairs import parse_pair, tell_sampled, why_nothing
from ..trace.ragged import array_of
from .condition import OWN, Condition, metric_named
from .sums import COUNTS, LARGEST, QUANTILES, SequenceColumns, left_out

TAILS = {
    "k2": 0.86, "k3": 0.89, "rms_d": 0.86, "ess_token": 0.84, "ess_sequence": 0.75, "chi2_token": 0.92, "chi2_sequence": 0.88,
}  # fmt: skip
"""Number that a few tokens can dominate -> measured coverage of its 95 % interval in runs whose logit errors have no
fourth moment: benchmarks/coverage.py, docs/evidence/intervals.md."""

_BOUNDS = {
    "k2": (0.0, math.inf), "k3": (0.0, math.inf), "mean_abs_d": (0.0, math.inf), "rms_d": (0.0, math.inf),
    "share_outside": (0.0, 1.0), "prob_diff_mean": (0.0, 1.0), "prob_pearson": (-1.0, 1.0),
    "log_ppl_abs_diff_sum": (0.0, math.inf), "log_ppl_abs_diff_mean": (0.0, math.inf), "ess_token": (0.0, 1.0),
    "ess_sequence": (0.0, 1.0), "chi2_token": (-1.0, math.inf), "chi2_sequence": (-1.0, math.inf),
}  # fmt: skip
"""Number -> lower and upper limit that the number and the ends of its interval cannot exceed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A measured number of a run, with its interval."""

    metric: str
    """Full name of the number."""
    value: float
    interval: Interval | NoInterval | None
    """Confidence interval, or why there is none; None for a count."""
    how: str
    """How the interval was computed, or why there is none."""


class Run:
    """A run whose numbers are to be measured."""

    def __init__(self, database: Database, pair: str, confidence: float, progress: Progress):
        self._database, self._pair, self._names = database, pair, parse_pair(pair)
        self._confidence, self._progress = confidence, progress
        self.left_out = ""
        """Which tokens the measured numbers exclude; empty if none is excluded."""

    def measure(self, conditions: list[Condition]) -> dict[str, Measured]:
        """Return condition -> its metric with value and interval."""
        found: dict[str, Measured] = {}
        for source in dict.fromkeys(condition.source for condition in conditions):
            of_source = [condition for condition in conditions if condition.source == source]
            database = self._database.reopened() if found else self._database  # a jackknife leaves sequences out
            found |= self._own(database, of_source) if source == OWN else self._like(database, source, of_source)
        return found

    def _own(self, database: Database, conditions: list[Condition]) -> dict[str, Measured]:
        """Return the numbers that conditions with source `tim` refer to."""
        asked = _Asked(conditions, stats(database, pair=self._pair, progress=self._progress))
        self.left_out = left_out(database, self._names)
        found = [
            Measured(metric=name, value=value, interval=None, how="a count has no interval")
            for name, value in asked.values.items()
            if name in COUNTS
        ]
        sampled = {name: value for name, value in asked.values.items() if name not in COUNTS}
        if sampled:
            columns = SequenceColumns.read(database, self._names)
            found += resampled(columns, sampled, self._confidence)
            found += [self._quantile(database, name, sampled[name], columns) for name in sampled if name in QUANTILES]
        of_sums = FROM_SUMS | LARGEST | QUANTILES
        if others := {name: value for name, value in sampled.items() if name not in of_sums}:
            found += self._jackknifed(database, others, lambda: stats(database, pair=self._pair))
        return asked.answered(found)

    def _like(self, database: Database, name: str, conditions: list[Condition]) -> dict[str, Measured]:
        """Return a framework's numbers with jackknife intervals. Tokens are read once, into sums per sequence."""
        tell_sampled(database, self._names)
        framework = framework_of(name, {})
        with read_once(database, framework, self._names):
            numbers = framework.numbers(database, self._names, "run")
            if not len(numbers):
                raise NothingToCompare(why_nothing(database, self._names))
            asked = _Asked(conditions, numbers)
            self.left_out = left_out(database, self._names)
            only = tuple(asked.values)
            return asked.answered(
                self._jackknifed(database, asked.values, lambda: framework.numbers(database, self._names, "run", only))
            )

    def _jackknifed(self, database: Database, values: dict[str, float], numbers: Callable[[], Rows]) -> list[Measured]:
        """Return numbers with intervals; they are computed again without each part of the sequences. They are NULL if
        all remaining tokens are masked."""
        sequences, unit_N = self._scored(database)
        part_N, without = parts_of(unit_N), list[dict[str, Any]]()
        num_parts = int(part_N.max()) + 1
        with self._progress("resampling", num_parts) as advance:
            for part in range(num_parts):
                database.leave_out(sequences.filter(number_array(part_N == part, pa.bool_())))
                row: dict[str, Any] = {}
                with suppress(NothingToCompare):
                    row = next(iter(numbers().dicts()), {})
                without.append(row)
                advance(1)
        num_groups = numbered(unit_N)[1]
        told = f"jackknife over {len(without)} parts of {num_groups:,} groups{_of_tails(min(TAILS.values()))}"
        found = []
        for metric, value in values.items():
            without_P = np.array([_number_of(left, metric) for left in without])
            interval = jackknife(value, without_P, self._confidence)
            how = _without(interval, num_groups) if isinstance(interval, NoInterval) else told
            found.append(Measured(metric=metric, value=value, interval=interval, how=how))
        return found

    def _quantile(self, database: Database, name: str, value: float, columns: SequenceColumns) -> Measured:
        """Return a quantile of |d| with its interval, obtained by inverting the interval of the share of tokens above
        `value` (Woodruff 1952)."""
        connection = database.connection
        tokens = f"pair_tokens({quoted_pair(self._names)}, NULL, NULL, NULL)"
        query = f"""
            SELECT count(d) AS num_tokens, count(*) FILTER (abs(d) > ?) AS num_above FROM {tokens}
            WHERE d IS NOT NULL GROUP BY run, step, seq_id, iteration_a, iteration_b
            ORDER BY run, step, seq_id, iteration_a, iteration_b
        """
        counts = connection.execute(query, [value]).fetchnumpy()
        num_above, num_tokens = (np.asarray(counts[column], np.float64) for column in ("num_above", "num_tokens"))
        cuts = quantile_cuts(QUANTILES[name], num_above, num_tokens, columns.unit_N, self._confidence)
        num_groups = numbered(columns.unit_N)[1]
        if isinstance(cuts, NoInterval):
            return Measured(metric=name, value=value, interval=cuts, how=_without(cuts, num_groups))
        query = f"SELECT quantile_cont(abs(d), {[*cuts, 1.0]!r}) FROM {tokens} WHERE d IS NOT NULL"
        (((low, high, largest),),) = connection.execute(query).fetchall()
        how = f"bootstrap-t over {num_groups:,} groups, on the share of tokens above it"
        how += ": ends at the largest value" if high == largest else ""
        return Measured(metric=name, value=value, interval=(float(low), float(high)), how=how)

    def _scored(self, database: Database) -> tuple[pa.Table, np.ndarray]:
        """Return the sequences scored by both passes, sorted by run, step and seq_id, and the group of each."""
        query = f"""
            SELECT run, step, seq_id, {unit("s")} AS unit FROM sequences AS s
            SEMI JOIN (SELECT run, step, seq_id FROM scores WHERE "pass" = ?) AS a USING (run, step, seq_id)
            SEMI JOIN (SELECT run, step, seq_id FROM scores WHERE "pass" = ?) AS b USING (run, step, seq_id)
            ORDER BY run, step, seq_id
        """
        found = database.connection.sql(query, params=[*self._names]).to_arrow_table()
        return found.drop_columns("unit"), array_of(found.column("unit"))


def resampled(columns: SequenceColumns, values: dict[str, float], confidence: float) -> list[Measured]:
    """Return intervals for those of `values` that are computed from sums or maxima over sequences."""
    num_groups = numbered(columns.unit_N)[1]
    statistics = {name: FROM_SUMS[name] for name in values if name in FROM_SUMS}
    intervals = bootstrap(statistics, columns.values, columns.unit_N, confidence)
    found = []
    for name, interval in intervals.items():
        how = f"bootstrap-t over {num_groups:,} groups" + (_of_tails(TAILS[name]) if name in TAILS else "")
        if isinstance(interval, NoInterval):
            how = _without(interval, num_groups)
        else:
            low, high = _BOUNDS.get(name, (-math.inf, math.inf))
            interval = max(interval[0], low), min(interval[1], high)
        found.append(Measured(metric=name, value=values[name], interval=interval, how=how))
    for name in [name for name in values if name in LARGEST]:
        largest = largest_interval(columns.largest[LARGEST[name]], columns.unit_N, confidence)
        how = f"bootstrap over {num_groups:,} groups, on the maximum: ends at the value"
        how = _without(largest, num_groups) if isinstance(largest, NoInterval) else how
        found.append(Measured(metric=name, value=values[name], interval=largest, how=how))
    return found


def quantile_cuts(
    probability: float, num_above_N: Array, num_tokens_N: Array, unit_N: np.ndarray, confidence: float
) -> Interval | NoInterval:
    """Return two probabilities whose quantiles are the ends of a quantile's interval, given the number of tokens above
    its value.

    If too few groups have a token above the value, the upper probability is 1, so the interval ends at the largest
    value.
    """

    def share(totals: Totals) -> Array:
        return totals["above"] / totals["tokens"]

    columns = {"above": num_above_N, "tokens": num_tokens_N}
    found = bootstrap({"share": share}, columns, unit_N, confidence, open_ended=True)["share"]
    if isinstance(found, NoInterval):
        return found
    # With ties the share above the value differs from 1 - p, so only the spread of the share is used.
    above = float(num_above_N.sum() / num_tokens_N.sum())
    low, high = (min(max(probability + above - end, 0.0), 1.0) for end in (found[1], found[0]))
    return low, high


class _Asked:
    """The metrics that some conditions refer to, and their values."""

    def __init__(self, conditions: list[Condition], rows: Rows):
        (row,) = rows.dicts()
        names = [name for name, value in row.items() if not isinstance(value, str)]
        self._metrics = {condition.text: metric_named(condition, names) for condition in conditions}
        self.values = {metric: _number_of(row, metric) for metric in self._metrics.values()}
        for metric in self.values:
            if row[metric] is None:
                raise NothingToCompare(f"{metric}: the trace has no value for it, so a bound on it proves nothing")

    def answered(self, found: list[Measured]) -> dict[str, Measured]:
        """Return condition -> its metric."""
        of_metric = {measured.metric: measured for measured in found}
        return {text: of_metric[metric] for text, metric in self._metrics.items()}


def _number_of(row: dict[str, Any], metric: str) -> float:
    """Return a number from a row of statistics; NaN if it is missing."""
    value = row.get(metric)
    return math.nan if value is None else float(value)


def _of_tails(level: float) -> str:
    return f"; if a few tokens dominate, a 95% interval holds the truth in {level:.0%} of runs"


def _without(why: NoInterval, num_groups: int) -> str:
    told = f"{num_groups:,} groups are {why}" if why is NoInterval.FEW else why
    return f"no interval: {told}"
