from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import pyarrow as pa

from ...schemas.errors import NothingToCompare
from ...tracer.arrow_arrays import number_array
from ...tracer.progress import Progress
from ..alarms.figures import FIGURES, NOT_FINITE, is_of_pair, read_figure
from ..frameworks.framework import read_once
from ..frameworks.registry import framework_of
from ..rows import Rows
from ..statistics.estimators import FROM_SUMS, Array
from ..statistics.intervals import (
    Interval,
    NoInterval,
    bootstrap,
    jackknife,
    largest_interval,
    numbered,
    parts_of,
    ratio_interval,
    unit,
)
from ..stats import stats
from ..trace.columns import parse_pair, tell_sampled, why_nothing
from ..trace.database import Database
from ..trace.macros import quoted_pair
from ..trace.ragged import array_of
from .condition import COUNTS, LARGEST, OWN, QUANTILES, Condition, SequenceColumns, is_count, left_out, metric_named

TAILS = {
    "k2": 0.84, "k3": 0.86, "rms_d": 0.85, "prob_pearson": 0.86, "ess_token": 0.80, "ess_sequence": 0.75, "chi2_token": 0.83,
    "chi2_sequence": 0.88,
}  # fmt: skip
"""Lowest measured coverage of a 95% interval, for metrics that a few tokens can dominate. Coverage is lowest
if logit errors are heavy-tailed (no fourth moment) or differ in scale between groups (docs/evidence/intervals.md)."""

_OF_SEQUENCE_WEIGHTS = re.compile(r"(ess|chi2)_seq")
"""Metrics based on the sequence weights exp(sum d), whose second moment depends on rare sequences."""

MOST_REACH = 1.0
"""If `SequenceColumns.reach` is above this (nats), sequence-weight metrics get no interval, because coverage can be as
low as 31% (docs/evidence/intervals.md)."""

_BOUNDS = {
    "k2": (0.0, math.inf), "k3": (0.0, math.inf), "mean_abs_d": (0.0, math.inf), "rms_d": (0.0, math.inf),
    "share_outside": (0.0, 1.0), "prob_diff_mean": (0.0, 1.0), "prob_pearson": (-1.0, 1.0),
    "log_ppl_abs_diff_sum": (0.0, math.inf), "log_ppl_abs_diff_mean": (0.0, math.inf), "ess_token": (0.0, 1.0),
    "ess_sequence": (0.0, 1.0), "chi2_token": (-1.0, math.inf), "chi2_sequence": (-1.0, math.inf),
}  # fmt: skip
"""Possible range of each metric. Confidence intervals are clipped to this range."""


_OF_STEPS = frozenset(FIGURES) - {*FROM_SUMS, *LARGEST, *QUANTILES, *COUNTS}
"""`tim` metrics that are defined only per step and have no `stats` column."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    metric: str
    value: float
    interval: Interval | NoInterval | None
    """Confidence interval, or the reason why it is missing. None if the metric is a count."""
    how: str
    """How the interval was computed, or why it is missing."""
    by_step: Mapping[int, float] = field(default_factory=dict)

    @property
    def leaves_out(self) -> bool:
        """True if the metric excludes tokens with non-finite logprobs."""
        return not is_count(self.metric) and (self.metric not in _OF_STEPS or is_of_pair(self.metric))


class Run:
    def __init__(self, database: Database, pair: str, confidence: float, progress: Progress):
        self._database, self._pair, self._names = database, pair, parse_pair(pair)
        self._confidence, self._progress = confidence, progress
        self.left_out = ""
        """Sentence about the excluded tokens, or empty if there are none."""

    def measure(self, conditions: list[Condition]) -> dict[str, Measured]:
        found: dict[str, Measured] = {}
        for source in dict.fromkeys(condition.source for condition in conditions):
            of_source = [condition for condition in conditions if condition.source == source]
            # reopened, because an earlier source's jackknife may have excluded sequences
            database = self._database.reopened() if found else self._database
            if source == OWN:
                of_steps = [condition for condition in of_source if condition.metric in _OF_STEPS]
                found |= {condition.text: self._of_steps(database, condition.metric) for condition in of_steps}
                of_source = [condition for condition in of_source if condition not in of_steps]
            if of_source:
                found |= self._own(database, of_source) if source == OWN else self._like(database, source, of_source)
        return found

    def _of_steps(self, database: Database, name: str) -> Measured:
        figure = read_figure(database, self._names, name)
        if figure is None or not len(figure[0]):
            raise _no_value(name)
        if is_of_pair(name):
            self.left_out = left_out(database, self._names)
        steps, values = figure
        value = float(values.sum() if name == NOT_FINITE else values.mean())
        how = "a count has no interval" if name == NOT_FINITE else f"mean of {len(steps)} steps; no interval"
        by_step = dict(zip(steps.tolist(), values.tolist(), strict=True))
        return Measured(metric=name, value=value, interval=None, how=how, by_step=by_step)

    def _own(self, database: Database, conditions: list[Condition]) -> dict[str, Measured]:
        whole = stats(database, pair=self._pair, progress=self._progress)
        asked = _Asked(conditions, whole, lambda metrics: stats(database, pair=self._pair, by="step"))
        self.left_out = left_out(database, self._names)
        found = [
            Measured(metric=name, value=value, interval=None, how="a count has no interval")
            for name, value in asked.sampled.items()
            if name in COUNTS
        ]
        sampled = {name: value for name, value in asked.sampled.items() if name not in COUNTS}
        if sampled:
            columns = SequenceColumns.read(database, self._names)
            found += resampled(columns, sampled, self._confidence)
            found += [self._quantile(database, name, sampled[name], columns) for name in sampled if name in QUANTILES]
        of_sums = FROM_SUMS | LARGEST | QUANTILES
        if others := {name: value for name, value in sampled.items() if name not in of_sums}:
            found += self._jackknifed(database, others, lambda: stats(database, pair=self._pair))
        return asked.answered(found)

    def _like(self, database: Database, name: str, conditions: list[Condition]) -> dict[str, Measured]:
        tell_sampled(database, self._names)
        framework = framework_of(name, {})
        numbers = partial(framework.numbers, database, self._names)
        with read_once(database, framework, self._names):
            whole = numbers("run")
            if not len(whole):
                raise NothingToCompare(why_nothing(database, self._names))
            asked = _Asked(conditions, whole, lambda metrics: numbers("step", ("step", *metrics)))
            self.left_out = left_out(database, self._names)
            only = tuple(asked.sampled)
            found = self._jackknifed(database, asked.sampled, lambda: numbers("run", only)) if only else []
            return asked.answered(found)

    def _jackknifed(self, database: Database, values: dict[str, float], numbers: Callable[[], Rows]) -> list[Measured]:
        sequences, unit_N = self._scored(database)
        part_N, without = parts_of(unit_N), list[Mapping[str, float | None]]()
        num_parts = int(part_N.max()) + 1
        with self._progress("resampling", num_parts) as advance:
            for part in range(num_parts):
                database.leave_out(sequences.filter(number_array(part_N == part, pa.bool_())))
                row: Mapping[str, float | None] = {}
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
            if _OF_SEQUENCE_WEIGHTS.search(metric) and isinstance(interval, tuple) and self._reach() > MOST_REACH:
                interval = NoInterval.UNSEEN
            found.append(_measured(metric, value, interval, told, num_groups))
        return found

    def _reach(self) -> float:
        database = self._database.reopened()
        stats(database, pair=self._pair, progress=self._progress)
        return SequenceColumns.read(database, self._names).reach()

    def _quantile(self, database: Database, name: str, value: float, columns: SequenceColumns) -> Measured:
        """Measure a quantile of |d|, with an interval derived from the share of tokens above it (Woodruff 1952)."""
        connection = database.connection
        tokens = f"pair_tokens({quoted_pair(self._names)})"
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
            return _measured(name, value, cuts, "", num_groups)
        query = f"SELECT quantile_cont(abs(d), {[*cuts, 1.0]!r}) FROM {tokens} WHERE d IS NOT NULL"
        (((low, high, largest),),) = connection.execute(query).fetchall()
        how = f"bootstrap-t over {num_groups:,} groups for the share of tokens above the value"
        how += "; the interval ends at the largest value" if high == largest else ""
        return Measured(metric=name, value=value, interval=(float(low), float(high)), how=how)

    def _scored(self, database: Database) -> tuple[pa.Table, np.ndarray]:
        query = f"""
            SELECT run, step, seq_id, {unit("s")} AS unit FROM sequences AS s
            SEMI JOIN (SELECT run, step, seq_id FROM scores WHERE "pass" = ?) AS a USING (run, step, seq_id)
            SEMI JOIN (SELECT run, step, seq_id FROM scores WHERE "pass" = ?) AS b USING (run, step, seq_id)
            ORDER BY run, step, seq_id
        """
        found = database.connection.sql(query, params=[*self._names]).to_arrow_table()
        return found.drop_columns("unit"), array_of(found.column("unit"))


def resampled(columns: SequenceColumns, values: dict[str, float], confidence: float) -> list[Measured]:
    """Compute bootstrap intervals over groups for metrics based on sums or maxima over sequences."""
    num_groups = numbered(columns.unit_N)[1]
    statistics = {name: FROM_SUMS[name] for name in values if name in FROM_SUMS}
    intervals = bootstrap(statistics, columns.values, columns.unit_N, confidence)
    found = []
    for name, interval in intervals.items():
        if _OF_SEQUENCE_WEIGHTS.search(name) and interval is not NoInterval.FEW and columns.reach() > MOST_REACH:
            interval = NoInterval.UNSEEN
        how = f"bootstrap-t over {num_groups:,} groups" + (_of_tails(TAILS[name]) if name in TAILS else "")
        if not isinstance(interval, NoInterval):
            low, high = _BOUNDS.get(name, (-math.inf, math.inf))
            interval = max(interval[0], low), min(interval[1], high)
        found.append(_measured(name, values[name], interval, how, num_groups))
    for name in [name for name in values if name in LARGEST]:
        largest = largest_interval(columns.largest[LARGEST[name]], columns.unit_N, confidence)
        how = f"bootstrap over {num_groups:,} groups for the maximum; the interval ends at the observed maximum"
        found.append(_measured(name, values[name], largest, how, num_groups))
    return found


def quantile_cuts(
    probability: float, num_above_N: Array, num_tokens_N: Array, unit_N: np.ndarray, confidence: float
) -> Interval | NoInterval:
    """Return the probabilities of the two quantiles that bound the interval. Probability 1 means the maximum."""
    found = ratio_interval(num_above_N, num_tokens_N, unit_N, confidence, open_ended=True)
    if isinstance(found, NoInterval):
        return found
    # With ties, the share above the value is not 1 - p, so shift p by the distances from this share to the bounds of
    # its interval.
    above = float(num_above_N.sum() / num_tokens_N.sum())
    low, high = (min(max(probability + above - end, 0.0), 1.0) for end in (found[1], found[0]))
    return low, high


class _Asked:
    def __init__(self, conditions: list[Condition], rows: Rows, by_step: Callable[[list[str]], Rows]):
        (row,) = rows.dicts()
        names = [name for name, value in row.items() if not isinstance(value, str)]
        self._metrics = {condition.text: metric_named(condition, names) for condition in conditions}
        self._values = {metric: _number_of(row, metric) for metric in self._metrics.values()}
        for metric in self._values:
            if row[metric] is None:
                raise _no_value(metric)
        self._steps = by_step([*self._values]).dicts()
        of_run = {self._metrics[condition.text] for condition in conditions if not condition.any_step}
        self.sampled = {metric: value for metric, value in self._values.items() if metric in of_run}
        """Metrics that at least one condition evaluates over all steps together."""

    def answered(self, found: list[Measured]) -> dict[str, Measured]:
        of_metric = {measured.metric: measured for measured in found}
        for metric, value in self._values.items():
            measured = of_metric.get(metric, Measured(metric=metric, value=value, interval=None, how=""))
            by_step = {row["step"]: _number_of(row, metric) for row in self._steps if row[metric] is not None}
            of_metric[metric] = replace(measured, by_step=by_step)
        return {text: of_metric[metric] for text, metric in self._metrics.items()}


def _no_value(metric: str) -> NothingToCompare:
    return NothingToCompare(f"{metric}: the trace has no value for this metric; remove this condition")


def _number_of(row: Mapping[str, float | None], metric: str) -> float:
    value = row.get(metric)
    return math.nan if value is None else float(value)


def _of_tails(level: float) -> str:
    return (
        f"; if a few tokens dominate or groups differ in scale, a 95% interval contains the true value in only "
        f"{level:.0%} of runs"
    )


def _measured(metric: str, value: float, interval: Interval | NoInterval, how: str, num_groups: int) -> Measured:
    if isinstance(interval, NoInterval):
        how = f"no interval: {f'{num_groups:,} groups are ' if interval is NoInterval.FEW else ''}{interval}"
    return Measured(metric=metric, value=value, interval=interval, how=how)
