"""A run's timeline: which series changed, in which order, and whether the outcome dropped. Shared by all commands."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from ...schemas.steps import ALL_STEPS
from ..statistics.change_points import cut, residuals, shortest, tail
from ..statistics.location import SHIFT, Located, locate
from ..statistics.noise import robust_sd, tamed
from ..trace.database import Database, cached
from ..trace.ragged import array_of
from ..trace.source import Pair
from . import thresholds as t
from .read_series import read_evaluations, read_series
from .relations import relation_by_step
from .rollouts import Rollouts
from .series import LOG, LOGIT, Fall, Outcome, Series, find_fall, is_named_outcome, refined

MOST = 1000
"""Maximum number of values that are searched for changes. In longer series, neighbouring steps are averaged first."""

FEWEST = 12


@dataclass(frozen=True, slots=True)
class ChangePoint:
    step: int
    """First step after the change. For a drop in an outcome, the onset reported by `attribute`."""
    low: int
    high: int
    """`low` to `high` is the 95% confidence interval."""
    before: float
    """Fitted value just before the change (original unit)."""
    after: float
    """Fitted value just before the next change or at the end."""
    size_in_sd: float
    """after - before on the series' scale (linear, log or logit), divided by the scatter on that scale."""
    p: float
    """Upper bound on the probability that a change this large occurs by chance anywhere in the series."""
    kind: str = SHIFT
    """`shift` for a jump, `ramp` for a new slope, e.g. when a slow decline begins or a rise ends."""


def change_points(series: Series) -> list[ChangePoint]:
    """Find the changes in a series by fitting straight segments. A steady trend is therefore not a change."""
    known = series.known
    steps, values = series.steps[known], series.scaled[known]
    if len(steps) < FEWEST:
        return []
    first, last, values = _thinned(steps, values)
    values = tamed(values)
    places, variance = cut(values)
    if not places:
        return []
    scatter = float(np.std(residuals(values, places))) or math.sqrt(variance)
    found = _located(values, places, variance)
    ends = [0, *(located.place for located in found), len(values)]
    of_bins = [series.values[known][np.searchsorted(steps, first[a]) : np.searchsorted(steps, last[b - 1], "right")]
               for a, b in pairwise(ends)]  # fmt: skip
    changes = [
        ChangePoint(
            step=int(first[located.place]),
            low=int(last[located.low - 1]) + 1,  # the change may have happened at any step after the previous value
            high=int(last[min(located.high, len(values) - 1)]),
            before=_unscaled(located.before, series.scale, before),
            after=_unscaled(located.after, series.scale, after),
            size_in_sd=(located.after - located.before) / scatter, p=tail(located.gain, len(values)), kind=located.kind,
        )
        for located, (before, after) in zip(found, pairwise(of_bins), strict=True)
    ]  # fmt: skip
    return [change for change in changes if f"{change.before:.3g}" != f"{change.after:.3g}"]  # else no reader sees it


def _located(values: np.ndarray, places: list[int], variance: float) -> list[Located]:
    margin, ends = shortest(len(values)), [0, *places, len(values)]
    changes: list[Located] = []
    for index in range(1, len(ends) - 1):
        start, end = ends[index - 1], ends[index + 1]
        one = locate(values[start:end], variance, margin)
        changes.append(replace(one, place=one.place + start, low=one.low + start, high=one.high + start))
        ends[index] = changes[-1].place
    return changes


def _unscaled(fitted: float, scale: str, values: np.ndarray) -> float:
    """Convert to the original unit, and clip to the recorded range, so that an all-zero segment stays exactly 0."""
    if scale == LOG:
        fitted = math.exp(min(fitted, 700.0))
    elif scale == LOGIT:
        fitted = 1.0 / (1.0 + math.exp(-max(min(fitted, 700.0), -700.0)))
    return float(np.clip(fitted, values.min(), values.max()))


def _thinned(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    width = -(-len(steps) // MOST)
    starts = np.arange(0, len(steps), width)
    counts = np.diff([*starts, len(steps)])
    return steps[starts], steps[starts + counts - 1], np.add.reduceat(values, starts) / counts


_METRICS = "SELECT step, name, value FROM metrics WHERE value IS NOT NULL AND name NOT LIKE 'hyperparameter/%' ORDER BY name, step"
_REWARDS = "SELECT reward FROM sequences WHERE isfinite(reward)"

MIN_VALUES = 3


@cached
def read_changes(database: Database, pair: Pair) -> dict[str, tuple[ChangePoint, ...]]:
    fall = read_fall(database, pair)
    series = read_series(database, pair=pair)
    changes = {}
    with database.progress("finding changes", len(series)) as advance:
        for name, one in series.items():
            onset = fall if fall is not None and fall.onset_of == name else None
            changes[name] = with_onset(tuple(change_points(one)), onset)
            advance(1)
    return changes


def with_onset(changes: tuple[ChangePoint, ...], fall: Fall | None) -> tuple[ChangePoint, ...]:
    if fall is None:
        return changes
    first, last = fall.interval
    descents = [
        change for change in changes if change.after < change.before and change.low <= last and first <= change.high
    ]
    onset = min(descents, key=lambda change: abs(change.step - fall.step), default=None)
    return tuple(
        replace(change, step=fall.step, low=first, high=last) if change is onset else change for change in changes
    )


@cached
def read_fall(database: Database, pair: Pair) -> Fall | None:
    """Return the drop in the run's outcome. If it is an evaluation, the reward may locate its onset more precisely."""
    outcomes = read_outcomes(database, pair)
    falls = [find_fall(outcome) for outcome in outcomes]
    if outcomes and outcomes[0].is_evaluation and not outcomes[-1].is_evaluation:
        return refined(falls[0], falls[-1])
    return falls[0] if falls else None


@cached
def known_run(database: Database, pair: Pair) -> tuple[Database, Fall | None]:
    """Return the run up to the last selected step, and the drop that begins after this step, if any.

    Without a selection of steps, or if the drop begins earlier, return the whole run and None.
    """
    if not database.kept_steps:
        return database, None
    last = database.kept_steps[database.sources[0].run][-1]
    whole = database.of_steps(ALL_STEPS)
    fall = read_fall(whole, pair)
    if fall is not None and fall.step <= last:
        return whole, None
    return database.of_steps(f":{last}"), fall


@cached
def read_outcomes(database: Database, pair: Pair) -> tuple[Outcome, ...]:
    """Return the run's outcomes with at least MIN_VALUES values, evaluations first. Drops are judged by the first one."""
    table = database.connection.sql(_METRICS).to_arrow_table()
    names = np.array(table["name"].to_pylist(), str)
    steps, values = array_of(table["step"]), array_of(table["value"])
    outcomes = []
    rewards = array_of(database.connection.sql(_REWARDS).to_arrow_table()["reward"])
    floor = min(float(np.quantile(rewards, 0.01)), 0.0) if len(rewards) else 0.0
    for name in sorted(read_evaluations(database)):
        of_name = names == name
        outcomes.append(_outcome(name, steps[of_name], values[of_name], floor, is_evaluation=True))
    reward = read_series(database, pair=pair).get("reward")
    if reward is not None:
        outcomes.append(_outcome("reward", reward.steps, reward.values, floor, is_evaluation=False))
    known = (outcome for outcome in outcomes if len(outcome.steps) >= MIN_VALUES)
    return tuple(sorted(known, key=lambda one: (not one.is_evaluation, not is_named_outcome(one.name))))


def _outcome(name: str, steps: np.ndarray, values: np.ndarray, floor: float, *, is_evaluation: bool) -> Outcome:
    known = np.isfinite(values)
    # An evaluation may have a different scale from the rewards, e.g. a share of correct answers. It gets their floor only
    # if it has negative values.
    has_floor = not is_evaluation or (known.any() and values[known].min() < 0)
    return Outcome(
        name=name, steps=steps[known].astype(np.int64), values=values[known], is_evaluation=is_evaluation,
        floor=floor if has_floor else 0.0,
    )  # fmt: skip


_BASE, _FEWEST = 15, 4
"""Maximum and minimum number of earlier steps that a step is compared with."""
_NEXT = 3
_LOGARITHMS = {"entropy": 0.05, "mean_abs_d": 0.3, "grad_norm": 0.05, "length": 0.01}
"""Series compared on a log scale -> minimum scatter to assume (natural log)."""


@dataclass(frozen=True, slots=True)
class Quantity:
    steps: np.ndarray
    values: np.ndarray
    least: float

    def off(self, place: int) -> np.ndarray:
        base = self.values[max(place - _BASE, 0) : place]
        if len(base) < _FEWEST:
            return np.empty(0)
        scatter = max(robust_sd(base), robust_sd(np.diff(base)) / np.sqrt(2), float(base.std()) / 2, self.least, 1e-12)
        return np.asarray((self.values[place : place + 1 + _NEXT] - np.median(base)) / scatter)

    def moves(self, place: int) -> float:
        off = self.off(place)
        if not len(off) or abs(off[0]) < t.MOVES_SD:
            return 0.0
        beside = np.sign(off[0]) * off[1:] >= t.MOVES_SD * t.MOVES_ON
        return float(off[0]) if beside.sum() >= min(_NEXT - 1, len(beside)) else 0.0


_OF_POLICY = ("mean_abs_d", "sampled", "trained", "entropy", "length")
_NOT_RECORDED = Quantity(np.empty(0, np.int64), np.empty(0), 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    columns: Mapping[str, Quantity]
    """`reward`, `entropy`, `length`, `mean_abs_d`, `grad_norm`, `sampled` and `trained` (the responses' mean logprob
    under engine and trainer), and `relation` (correlation between likelihood and reward within groups)."""
    first: int
    last: int

    def size(self, name: str, step: int) -> float:
        column = self.columns.get(name, _NOT_RECORDED)
        place = np.flatnonzero(column.steps == step)
        return column.moves(int(place[0])) if len(place) else 0.0

    def step(self, name: str) -> int | None:
        column = self.columns.get(name, _NOT_RECORDED)
        near = column.steps[(column.steps >= self.first) & (column.steps <= self.last)]
        return next((int(step) for step in near if self.size(name, int(step))), None)

    def moves_at(self, step: int, *names: str) -> bool:
        return any(self.size(name, at) for name in names for at in range(step - int(t.AHEAD) - 1, step + 1))

    def policy_stays_at(self, step: int) -> bool:
        """Return True if the policy was recorded and does not change at the step."""
        is_known = any(len(self.columns.get(name, _NOT_RECORDED).steps) for name in _OF_POLICY)
        return is_known and not self.moves_at(step, *_OF_POLICY)

    def breaks(self, name: str) -> int | None:
        column = self.columns.get(name, _NOT_RECORDED)
        end = int(np.searchsorted(column.steps, self.last, side="right"))
        for place in range(_FEWEST, end):
            off = column.off(place)
            if len(off) < 2 or off[: _NEXT - 1].max() > -t.BREAKS_SD:
                continue
            base = column.values[max(place - _BASE, 0) : place]
            usual, rest = float(np.median(base)), column.values[place : max(end, place + _NEXT)]
            lost = rest < usual - max(t.BREAK_LOSES * abs(usual), t.BREAKS_SD / 2 * max(robust_sd(base), column.least))
            if usual >= t.BREAKABLE and lost.mean() >= t.ALMOST_ALL and len(rest) >= _NEXT - 1:
                return int(column.steps[place])
        return None


NOTHING = Moves(columns={}, first=0, last=-1)


def read_moves(series: Mapping[str, Series], rollouts: Rollouts, fall: Fall) -> Moves:
    found = {
        "sampled": (*rollouts.by_step(rollouts.sampled), 0.005),
        "trained": (*rollouts.by_step(rollouts.likelihood), 0.005),
        "relation": (*relation_by_step(rollouts, "likelihood", "reward"), 0.05),
    }
    for name, least in _LOGARITHMS.items():
        if name in series:
            found[name] = (series[name].steps, np.log(np.maximum(series[name].values, 1e-6)), least)
    if (reward := series.get("reward")) is not None and np.isfinite(reward.values).any():
        found["reward"] = (reward.steps, reward.values, 0.02 * float(np.nanstd(reward.values)))
    columns = {}
    for name, (steps, values, least) in found.items():
        known = np.isfinite(values)
        columns[name] = Quantity(steps[known], values[known], least)
    first, last = fall.interval[0] - int(t.AHEAD) - 2, fall.latest
    return Moves(columns=columns, first=first, last=last)
