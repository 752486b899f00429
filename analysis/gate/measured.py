"""Numbers of a run, and their intervals over sequences."""

from __future__ import annotations

import math
import os
from functools import partial

import numpy as np
import pyarrow as pa

from ...schemas.errors import NothingToCompare
from ...tracer.progress import Progress
from ..database import Database
from ..pairs import parse_pair, quoted_pair
from ..stats import stats
from ..totals import FROM_SUMS, Array
from .condition import OWN, Condition, metric_named
from .intervals import Interval, bootstrap, bootstrap_share, jackknife
from .sums import COUNTS, LARGEST, QUANTILES, SequenceColumns

Told = tuple[Interval | None, str]
"""An interval, and how it was found."""


class Run:
    """One run and what is asked of it."""

    def __init__(self, trace: str | os.PathLike[str], pair: str, confidence: float, progress: Progress):
        self._trace, self._pair, self._names = trace, pair, parse_pair(pair)
        self._confidence, self._progress = confidence, progress

    def measure(self, conditions: list[Condition]) -> dict[str, tuple[str, float, Interval | None, str]]:
        """Condition -> full name of its metric, its value, its interval and how that was found."""
        found: dict[str, tuple[str, float, Interval | None, str]] = {}
        for source in dict.fromkeys(condition.source for condition in conditions):
            like = None if source == OWN else source
            numbers = self._numbers(Database(self._trace), like)
            wanted = {c.text: metric_named(c, list(numbers)) for c in conditions if c.source == source}
            values = {metric: _value(numbers[metric], metric) for metric in wanted.values()}
            intervals = self._intervals(values, like)
            found |= {text: (metric, values[metric], *intervals[metric]) for text, metric in wanted.items()}
        return found

    def _numbers(self, database: Database, like: str | None) -> dict[str, object]:
        """Every number of the run, by name."""
        (row,) = stats(database, pair=self._pair, by="run", like=like, progress=self._progress).dicts()
        return {name: value for name, value in row.items() if not isinstance(value, str)}

    def _intervals(self, values: dict[str, float], like: str | None) -> dict[str, Told]:
        found: dict[str, Told] = (
            {} if like else self._resampled([name for name in values if name in FROM_SUMS | LARGEST])
        )
        for name, value in values.items():
            if like is None and name in COUNTS:
                found[name] = (None, "a count has no interval")
            elif like is None and name in QUANTILES:
                found[name] = (self._of_quantile(value, QUANTILES[name]), "bootstrap of the share of tokens above it")
        return found | self._jackknifed({name: value for name, value in values.items() if name not in found}, like)

    def _resampled(self, metrics: list[str]) -> dict[str, Told]:
        """Intervals of what follows from sequences' sums and largest values."""
        if not metrics:
            return {}
        columns = SequenceColumns(Database(self._trace), self._names)
        intervals = bootstrap(columns, metrics, self._confidence)
        return {name: (ends, _told(name, ends, len(columns))) for name, ends in intervals.items()}

    def _of_quantile(self, value: float, probability: float) -> Interval | None:
        """The quantiles of |d| at the ends of what the share of tokens above `value` may be (Woodruff 1952)."""
        connection = Database(self._trace).connection
        tokens = f"pair_tokens({quoted_pair(self._names)}, NULL, NULL, NULL)"
        query = f"""
            SELECT count(d) AS num_tokens, count(*) FILTER (abs(d) > ?) AS num_above FROM {tokens}
            WHERE d IS NOT NULL GROUP BY run, step, seq_id, iteration_a, iteration_b
            ORDER BY run, step, seq_id, iteration_a, iteration_b
        """
        counts = connection.execute(query, [value]).fetchnumpy()
        num_above, num_tokens = np.asarray(counts["num_above"], float), np.asarray(counts["num_tokens"], float)
        shares = bootstrap_share(num_above, num_tokens, self._confidence)
        if shares is None:
            return None
        # Ties put more or less above the value than 1 - p: only the spread of the share is taken.
        above = float(num_above.sum() / num_tokens.sum())
        ends = [min(max(probability + above - share, 0.0), 1.0) for share in (shares[1], shares[0])]
        query = f"SELECT quantile_cont(abs(d), {ends!r}) FROM {tokens} WHERE d IS NOT NULL"
        ((cuts,),) = connection.execute(query).fetchall()
        return float(cuts[0]), float(cuts[1])

    def _jackknifed(self, values: dict[str, float], like: str | None) -> dict[str, Told]:
        """Intervals from replicates in each of which a group of sequences is left out."""
        if not values:
            return {}
        sequences = self._scored()
        replicates: dict[bytes, dict[str, object]] = {}

        def without(name: str, places: Array) -> float:
            key = places.tobytes()
            if key not in replicates:
                database = Database(self._trace)
                database.leave_out(sequences.take(pa.array(places)))
                try:
                    replicates[key] = self._numbers(database, like)
                except NothingToCompare:  # what is left is masked as a whole
                    replicates[key] = {}
            value = replicates[key].get(name)
            return float(value) if isinstance(value, (int, float)) else math.nan

        found: dict[str, Told] = {}
        for name, value in values.items():
            ends = jackknife(len(sequences), value, partial(without, name), self._confidence)
            none = "no interval: fewer than six sequences, or no value without some"
            found[name] = (ends, f"jackknife over {len(sequences):,} sequences" if ends else none)
        return found

    def _scored(self) -> pa.Table:
        """The sequences that both passes scored, by run, step and seq_id, in order."""
        query = """
            SELECT DISTINCT run, step, seq_id FROM scores WHERE "pass" = ?
            INTERSECT SELECT DISTINCT run, step, seq_id FROM scores WHERE "pass" = ?
            ORDER BY ALL
        """
        return Database(self._trace).connection.sql(query, params=[*self._names]).to_arrow_table()


def _value(value: object, metric: str) -> float:
    if not isinstance(value, (int, float)):
        raise NothingToCompare(f"{metric}: the trace has no value of it, so that nothing can be said of a bound on it")
    return float(value)


def _told(name: str, interval: Interval | None, num_sequences: int) -> str:
    if interval is None:
        return "no interval: a resample has no value"
    return f"bootstrap over {num_sequences:,} sequences" + (
        ", of the largest: ends at the value" if name in LARGEST else ""
    )
