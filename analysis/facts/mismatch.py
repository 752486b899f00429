"""A run's mismatch by step, from stored sums or tokens, and its summary around a drop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ...tracer.arrow_arrays import number_array
from ..statement import Measured
from ..statistics.estimators import Array
from ..trace.columns import OptionalColumns, sequence_columns
from ..trace.database import Database
from ..trace.macros import quoted_pair
from ..trace.pair_sums import BATCH_ROWS, Sizes, finite, pair_sums, sizes_of
from ..trace.quantiles import SHARES, Histogram, quantile_cont, quantiles
from ..trace.ragged import array_of
from ..trace.source import Pair
from ..trace.tokens import PassRows, step_ranges, token_query, tokens_by_step, tokens_of_rows
from . import thresholds as t
from .rollouts import CERTAIN_LOGPROB, Rollouts
from .series import Fall, Series, columns_of

_SUMS = ("num_tokens", "sum_d", "sum_abs_d", "sum_k3", "max_abs_d", "peak_d", "sum_weight", "sum_weight2")
_SIGNED = ("num_tokens", "sum_k3")
_SIGNS = {"positive": 1, "negative": -1}
_KEPT = f"""
SELECT step, seq_id, {", ".join(_SUMS)}, advantage
FROM pair_sums({{pair}}) LEFT JOIN (SELECT run, step, seq_id, advantage FROM sequences) USING (run, step, seq_id)
"""
_CUTS = "SELECT step, p99_abs_d FROM step_cuts({pair})"


def read_step_mismatch(database: Database, pair: Pair) -> list[Series]:
    """Return the mismatch by step. Stored sums and tokens give the same bits."""
    has = sequence_columns(database)
    if database.sums.covers(pair) and not has.advantages and _used_once(database, pair):
        kept, cuts = (query.format(pair=quoted_pair(pair)) for query in (_KEPT, _CUTS))
        table = database.connection.sql(kept).to_arrow_table()
        rows = _by_step(table, dict(database.connection.execute(cuts).fetchall()))
    else:
        rows = _of_tokens(database, pair, has)
    names = f"{pair[0]} - {pair[1]}"
    sources = dict.fromkeys(("k3", "mean_abs_d", "p99_abs_d", "max_abs_d", "mean_d", "ess"), f"d = {names}, nats")
    for sign in _SIGNS:
        sources[f"k3_{sign}"] = f"d = {names}, nats, tokens with a {sign} advantage"
    return columns_of(rows, sources)


@dataclass(frozen=True, slots=True)
class _StepBatch:
    sums: pa.Table
    sizes: Sizes
    num_read: int
    """Number of tokens read, including those excluded from the sums."""


def _of_tokens(database: Database, pair: Pair, has: OptionalColumns) -> dict[str, np.ndarray]:
    lists = [name for name in ("mask", "advantage", "advantages") if getattr(has, name)]
    passes = {"a": PassRows(name=pair[0]), "b": PassRows(name=pair[1])}
    num_tokens, run = tokens_by_step(database), database.sources[0].run
    parts = []
    with database.progress("reading tokens by step", sum(num_tokens.values())) as advance:
        for steps in step_ranges(num_tokens) or [range(0)]:
            query = token_query(passes, ["a.run", "a.step", "a.seq_id"], run=run, steps=steps, lists=lists)
            batches = []
            for batch in database.connection.mapped_batches(query, _of_batch, BATCH_ROWS):
                advance(batch.num_read)
                batches.append(batch)
            sizes: dict[int, list[Array]] = {}
            for _, step, part in chain.from_iterable(batch.sizes for batch in batches):
                sizes.setdefault(step, []).append(part)
            cuts = {step: _p99(np.concatenate(found)) for step, found in sizes.items()}
            parts.append(_by_step(pa.concat_tables([batch.sums for batch in batches]), cuts))
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _p99(abs_d_T: Array) -> float | None:
    return quantiles([abs_d_T], Histogram.of(abs_d_T), quantile_cont)[SHARES.index(0.99)]


def _of_batch(rows: pa.RecordBatch) -> _StepBatch:
    tokens = tokens_of_rows(rows, ("a", "b"))
    kept = finite(tokens)
    sums = pair_sums(kept, _SUMS)
    for name, sign in _SIGNS.items():
        if tokens.advantage_T is not None:
            signed = pair_sums(finite(tokens.where(sign * tokens.advantage_T > 0)), _SIGNED)
            sums |= {f"{column}_{name}": values for column, values in signed.items()}
    if tokens.advantage_N is not None:
        sums["advantage"] = tokens.advantage_N
    keys = {name: rows.column(name) for name in ("step", "seq_id")}
    return _StepBatch(pa.table(keys | sums), sizes_of(rows, kept), int(tokens.lengths_N.sum()))


def _by_step(table: pa.Table, p99: Mapping[int, float | None]) -> dict[str, np.ndarray]:
    table = table.take(number_array(np.flatnonzero(array_of(table["num_tokens"]) > 0), pa.int64()))
    table = table.take(pc.sort_indices(table, [("step", "ascending"), ("seq_id", "ascending")]))
    sums = {name: array_of(table[name]) for name in table.column_names if name != "seq_id"}
    steps, place_N = np.unique(sums["step"], return_inverse=True)
    if "advantage" in sums:
        for name, sign in _SIGNS.items():
            is_signed = sign * sums["advantage"] > 0
            sums |= {f"{column}_{name}": np.where(is_signed, sums[column], 0) for column in _SIGNED}

    def total(values_N: Array) -> Array:
        return np.bincount(place_N, values_N, minlength=len(steps)).astype(np.float64)

    def largest(values_N: Array) -> Array:
        found = np.full(len(steps), -np.inf)
        np.maximum.at(found, place_N, values_N)
        return found

    n = total(sums["num_tokens"])
    scale_N = np.exp(sums["peak_d"] - largest(sums["peak_d"])[place_N])
    rows = {
        "step": steps, "mean_d": total(sums["sum_d"]) / n, "mean_abs_d": total(sums["sum_abs_d"]) / n,
        "k3": total(sums["sum_k3"]) / n, "max_abs_d": largest(sums["max_abs_d"]),
        "ess": total(sums["sum_weight"] * scale_N) ** 2 / (n * total(sums["sum_weight2"] * scale_N**2)),
        "p99_abs_d": np.array([p99[step] for step in steps.tolist()], np.float64),
    }  # fmt: skip
    with np.errstate(invalid="ignore"):
        for name in _SIGNS:
            if f"sum_k3_{name}" in sums:
                rows[f"k3_{name}"] = total(sums[f"sum_k3_{name}"]) / total(sums[f"num_tokens_{name}"])
    return rows


def _used_once(database: Database, pair: Pair) -> bool:
    query = f"SELECT coalesce(max(greatest(iteration_a, iteration_b)), 0) FROM pair_sums({quoted_pair(pair)})"
    return bool(database.connection.execute(query).fetchall() == [(0,)])


_WIDTH = 3


def read_mismatch_size(series: Mapping[str, Series], fall: Fall | None) -> float | None:
    """Return mean |d| at the onset of the drop: the median over the preceding tenth of the run or, if larger, the
    largest median of three steps around the onset. Without a drop, return the median over the run."""
    mean_abs_d = series.get("mean_abs_d")
    if mean_abs_d is None or not mean_abs_d.known.any():
        return None
    steps, values = mean_abs_d.steps[mean_abs_d.known], mean_abs_d.values[mean_abs_d.known]
    if fall is None:
        return float(np.median(values))
    width = max(len(values) // 10, 3)
    end = max(int(np.searchsorted(steps, fall.step, side="right")), width)
    first, last = min(fall.interval[0], fall.low), max(fall.interval[1], fall.high, fall.fallen)
    return max(float(np.median(values[end - width : end])), _largest(steps, values, first, last))


def _largest(steps: np.ndarray, values: np.ndarray, first: int, last: int) -> float:
    within = values[(steps >= first) & (steps <= last)]
    around = values[(steps >= first) & (steps <= last + _WIDTH - 1)]
    if not len(within) or len(around) < _WIDTH:
        return float(np.median(within)) if len(within) else 0.0
    medians = np.median(np.lib.stride_tricks.sliding_window_view(around, _WIDTH), axis=-1)
    return min(float(medians.max()), float(within.max()))


_SOON = 20
"""If a prefix recurs after more than this many steps, an equal logprob shows that the engine gets no new weights, but a
different one does not show that it still gets any."""
_FEWEST_STILL = 4
_SAME_BITS = 1e-7
"""Tolerance when comparing two means over the same float32 logprobs (nats)."""
_NEAR = 1e-4
"""Tolerance when matching logprobs at a single step (nats), where chance matches are rare."""
_NEARER = 10.0
"""An engine that rounds its logprobs matches an earlier trainer step if that step's logprob is this many times nearer
than the trainer's current one."""
_MOST_HELD = 5_000_000
_FEWEST_OF_VERSION = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StillEngine:
    num_pairs: int
    still: float
    of_trainer: float

    @property
    def values(self) -> dict[str, Measured]:
        return {"num_openings": self.num_pairs, "still_share": self.still, "trainer_share": self.of_trainer}

    @property
    def explains(self) -> bool:
        return self.still >= t.STILL and self.of_trainer <= t.STILL_BY_CHANCE


def read_still_engine(rollouts: Rollouts, first: float) -> StillEngine | None:
    """Return the shares of repeated prefixes with the same logprob as before in the engine and in the trainer.

    Only prefixes from step `first` on are considered. Return None if too few of them are repeated.
    """
    opening, step, sampled, trained = _first_of_step(rollouts)
    again = (opening[1:] == opening[:-1]) & (step[:-1] >= first)
    again &= (sampled[1:] < -CERTAIN_LOGPROB) & (trained[1:] < -CERTAIN_LOGPROB)
    soon = again & (step[1:] - step[:-1] <= _SOON)
    is_soon = soon.sum() >= _FEWEST_STILL
    again = soon if is_soon else again
    if again.sum() < _FEWEST_STILL:
        return None
    moved = [np.abs(values[1:] - values[:-1])[again] for values in (sampled, trained)]
    still, of_trainer = (float((each <= _SAME_BITS).mean()) for each in moved)
    if not is_soon and still < t.STILL:
        return None
    return StillEngine(num_pairs=int(again.sum()), still=still, of_trainer=of_trainer)


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierWeights:
    """Engine logprobs that differ from the trainer's but may match an earlier trainer step for the same prefix."""

    version: int
    """Best matching trainer step, or its distance in steps if `is_distance`. 0 if no step has enough prefixes."""
    is_distance: bool
    agreement: float
    num_agreeing: int

    @property
    def values(self) -> dict[str, Measured]:
        return {"version": self.version, "share": self.agreement, "num_agreeing": self.num_agreeing}

    @property
    def explains(self) -> bool:
        return self.agreement >= t.EARLIER_AGREES


def read_earlier_weights(rollouts: Rollouts, first: float) -> EarlierWeights | None:
    """From step `first` on, match the engine's prefix logprobs against the trainer's from earlier steps."""
    opening, step, sampled, trained = _first_of_step(rollouts)
    # Match only prefixes where engine and trainer differ, because only one of several replicas may lag.
    off = (step >= first) & (np.abs(sampled - trained) > CERTAIN_LOGPROB) & (sampled < -CERTAIN_LOGPROB)
    starts = np.flatnonzero(np.r_[True, opening[1:] != opening[:-1]])
    since = starts[np.searchsorted(starts, np.arange(len(opening)), side="right") - 1] if len(starts) else starts
    rows = np.flatnonzero(off)
    rows = rows[rows > since[rows]]
    if not len(rows):
        return None
    rows = rows[:: -(-int((rows - since[rows]).sum()) // _MOST_HELD)]
    # Pair every row with all earlier rows for the same prefix.
    counts = rows - since[rows]
    at = np.repeat(rows, counts)
    before = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(since[rows], counts)
    apart = sampled[at] - trained[before]
    near = np.maximum(_NEAR, np.abs(sampled - trained)[at] / _NEARER)
    version, is_distance, agreement, num = 0, False, 0.0, 0
    for of_distance, key in ((True, step[at] - step[before]), (False, step[before])):
        keys, place = np.unique(key, return_inverse=True)
        total = np.bincount(place)
        exact, rounded, off_by = (
            np.bincount(place, each) / total for each in (np.abs(apart) <= _NEAR, np.abs(apart) <= near, np.abs(apart))
        )
        is_old = (rounded >= t.ROUNDED_AGREES) & (total >= _FEWEST_OF_VERSION)
        share = np.where(is_old, rounded, exact) * (total >= _FEWEST_OF_VERSION)
        best = int(np.where(is_old, off_by, np.inf).argmin() if is_old.any() else share.argmax())
        if share[best] > agreement:
            version, is_distance, agreement, num = int(keys[best]), of_distance, float(share[best]), int(total[best])
    return EarlierWeights(version=version, is_distance=is_distance, agreement=agreement, num_agreeing=num)


def _first_of_step(rollouts: Rollouts) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    known = np.isfinite(rollouts.opening_sampled) & np.isfinite(rollouts.opening_trained)
    opening = np.unique(rollouts.opening[known], return_inverse=True)[1].astype(np.int64)
    step = rollouts.step[known].astype(np.int64)
    order = np.lexsort((step, opening))
    opening, step = opening[order], step[order]
    first = np.r_[True, (opening[1:] != opening[:-1]) | (step[1:] != step[:-1])] if len(step) else np.empty(0, bool)
    sampled, trained = (column[known][order][first] for column in (rollouts.opening_sampled, rollouts.opening_trained))
    return opening[first], step[first], sampled, trained
