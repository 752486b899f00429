"""Numbers of a run, and their intervals over groups of sequences."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa

from ...schemas.errors import NothingToCompare
from ...tracer.progress import Advance, Progress, no_progress
from ..statistics.estimators import FROM_SUMS, Array, Totals
from ..statistics.intervals import PARTS, Interval, NoInterval, bootstrap, jackknife, largest_interval, numbered, unit
from ..stats import stats
from ..trace.database import Database
from ..trace.pairs import parse_pair, quoted_pair
from .condition import OWN, Condition, metric_named
from .sums import COUNTS, LARGEST, QUANTILES, SequenceColumns

TAILS = {
    "k2": 0.86, "k3": 0.89, "rms_d": 0.86, "ess_token": 0.84, "ess_sequence": 0.75, "chi2_token": 0.92, "chi2_sequence": 0.88,
}  # fmt: skip
"""Numbers that a few tokens can carry -> in what share of such runs an interval of 95 % held the truth, measured where
errors of logits have tails without a fourth moment: benchmarks/coverage.py, docs/intervals.md."""

_BOUNDS = {
    "k2": (0.0, math.inf), "k3": (0.0, math.inf), "mean_abs_d": (0.0, math.inf), "rms_d": (0.0, math.inf),
    "share_outside": (0.0, 1.0), "prob_diff_mean": (0.0, 1.0), "prob_pearson": (-1.0, 1.0),
    "log_ppl_abs_diff_sum": (0.0, math.inf), "log_ppl_abs_diff_mean": (0.0, math.inf), "ess_token": (0.0, 1.0),
    "ess_sequence": (0.0, 1.0), "chi2_token": (-1.0, math.inf), "chi2_sequence": (-1.0, math.inf),
}  # fmt: skip
"""What a number cannot leave, nor its interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A number of a run."""

    metric: str
    """Its full name."""
    value: float
    interval: Interval | NoInterval | None
    """None of a count, which is what it is."""
    how: str
    """How the interval was found, or why there is none."""


class Run:
    """One run and what is asked of it."""

    def __init__(self, trace: str | os.PathLike[str], pair: str, confidence: float, progress: Progress):
        self._trace, self._pair, self._names = trace, pair, parse_pair(pair)
        self._confidence, self._progress = confidence, progress

    def measure(self, conditions: list[Condition]) -> dict[str, Measured]:
        """Condition -> its metric, with its value and its interval."""
        found: dict[str, Measured] = {}
        for source in dict.fromkeys(condition.source for condition in conditions):
            like = None if source == OWN else source
            database = Database(self._trace)
            numbers = self._numbers(database, like, self._progress)
            wanted = {c.text: metric_named(c, list(numbers)) for c in conditions if c.source == source}
            values = {metric: _value(numbers[metric], metric) for metric in wanted.values()}
            measured = self._measured(database, values, like)
            found |= {text: measured[metric] for text, metric in wanted.items()}
        return found

    def _numbers(self, database: Database, like: str | None, progress: Progress = no_progress) -> dict[str, object]:
        """Every number of the run, by name."""
        (row,) = stats(database, pair=self._pair, by="run", like=like, progress=progress).dicts()
        return {name: value for name, value in row.items() if not isinstance(value, str)}

    def _measured(self, database: Database, values: dict[str, float], like: str | None) -> dict[str, Measured]:
        own = [] if like else [name for name in values if name in FROM_SUMS | LARGEST | QUANTILES]
        columns = SequenceColumns.read(database, self._names) if own else None
        found = [] if columns is None else resampled(columns, {name: values[name] for name in own}, self._confidence)
        for name, value in values.items():
            if like is None and name in COUNTS:
                found.append(Measured(metric=name, value=value, interval=None, how="a count has no interval"))
            elif columns is not None and name in QUANTILES:
                found.append(self._quantile(name, value, columns))
        measured = {each.metric: each for each in found}
        return measured | self._jackknifed(
            {name: value for name, value in values.items() if name not in measured}, like
        )

    def _quantile(self, name: str, value: float, columns: SequenceColumns) -> Measured:
        """The quantiles of |d| at the ends of what the share of tokens above `value` may be (Woodruff 1952)."""
        connection = Database(self._trace).connection
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
        how = f"bootstrap-t over {num_groups:,} groups, of the share of tokens above it"
        how += ": ends at the largest value" if high == largest else ""
        return Measured(metric=name, value=value, interval=(float(low), float(high)), how=how)

    def _jackknifed(self, values: dict[str, float], like: str | None) -> dict[str, Measured]:
        """Intervals from replicates in each of which a part of the groups is left out."""
        if not values:
            return {}
        database = Database(self._trace)
        sequences = self._scored(database)
        unit_N = sequences.column("unit").to_numpy()
        num_groups = numbered(unit_N)[1]
        replicates: dict[bytes, dict[str, object]] = {}

        def without(advance: Advance, name: str, places: Array) -> float:
            key = places.tobytes()
            if key not in replicates:
                database.leave_out(sequences.take(pa.array(places)))
                try:
                    replicates[key] = self._numbers(database, like)
                except NothingToCompare:  # what is left is masked as a whole
                    replicates[key] = {}
                advance(1)
            value = replicates[key].get(name)
            return float(value) if isinstance(value, (int, float)) else math.nan

        how = f"jackknife over {min(PARTS, num_groups)} parts of {num_groups:,} groups{_of_tails(min(TAILS.values()))}"
        found = {}
        with self._progress("resampling", min(PARTS, num_groups)) as advance:
            for name, value in values.items():
                interval = jackknife(unit_N, value, partial(without, advance, name), self._confidence)
                told = _without(interval, num_groups) if isinstance(interval, NoInterval) else how
                found[name] = Measured(metric=name, value=value, interval=interval, how=told)
        return found

    def _scored(self, database: Database) -> pa.Table:
        """The sequences that both passes scored, with their groups, by run, step and seq_id, in order."""
        query = f"""
            SELECT run, step, seq_id, {unit("s")} AS unit FROM sequences AS s
            SEMI JOIN (SELECT run, step, seq_id FROM scores WHERE "pass" = ?) AS a USING (run, step, seq_id)
            SEMI JOIN (SELECT run, step, seq_id FROM scores WHERE "pass" = ?) AS b USING (run, step, seq_id)
            ORDER BY run, step, seq_id
        """
        return database.connection.sql(query, params=[*self._names]).to_arrow_table()


def resampled(columns: SequenceColumns, values: dict[str, float], confidence: float) -> list[Measured]:
    """The numbers among `values` that follow from sequences' sums, or are the largest of theirs, with their intervals."""
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
        how = f"bootstrap over {num_groups:,} groups, of the largest: ends at the value"
        how = _without(largest, num_groups) if isinstance(largest, NoInterval) else how
        found.append(Measured(metric=name, value=values[name], interval=largest, how=how))
    return found


def quantile_cuts(
    probability: float, num_above_N: Array, num_tokens_N: Array, unit_N: np.ndarray, confidence: float
) -> Interval | NoInterval:
    """The probabilities whose quantiles are the ends of a quantile's interval, from how many tokens lie above its value.

    Where too few groups have a token above it, the upper one is 1: the interval ends at the largest value.
    """

    def share(totals: Totals) -> Array:
        return totals["above"] / totals["tokens"]

    columns = {"above": num_above_N, "tokens": num_tokens_N}
    found = bootstrap({"share": share}, columns, unit_N, confidence, open_ended=True)["share"]
    if isinstance(found, NoInterval):
        return found
    # Ties put more or less above the value than 1 - p: only the spread of the share is taken.
    above = float(num_above_N.sum() / num_tokens_N.sum())
    low, high = (min(max(probability + above - end, 0.0), 1.0) for end in (found[1], found[0]))
    return low, high


def _value(value: object, metric: str) -> float:
    if not isinstance(value, (int, float)):
        raise NothingToCompare(f"{metric}: the trace has no value of it, so that nothing can be said of a bound on it")
    return float(value)


def _of_tails(level: float) -> str:
    return f"; where a few tokens carry it, one of 95 % holds in {level:.0%}"


def _without(why: NoInterval, num_groups: int) -> str:
    told = f"{num_groups:,} groups are {why}" if why is NoInterval.FEW else why
    return f"no interval: {told}"
