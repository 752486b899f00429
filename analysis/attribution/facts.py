"""Everything that a judgement looks at, read from a trace once."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ...schemas.errors import NothingToCompare, TimTraceError
from ..check.check import gather, judge
from ..check.result import CheckResult
from ..dynamics.changes import ChangePoint, change_points
from ..dynamics.series import Series, read_series
from ..trace.database import Database, opened
from ..trace.source import Pair
from . import thresholds as t
from .drop import Drop, read_drop
from .fall import Fall, Outcome, find_fall, is_evaluation, lost_share, refined
from .mismatch import RunMismatch, read_run_mismatch
from .rollouts import Repeats, Rollouts, read_rollouts, relation, repeats
from .settings import read_settings
from .staleness import StaleWeights, read_stale_weights

_METRICS = "SELECT step, name, value FROM metrics WHERE value IS NOT NULL AND name NOT LIKE 'hyperparameter/%' ORDER BY name, step"
_REWARDS = "SELECT reward FROM sequences WHERE isfinite(reward)"

_FEWEST_VALUES = 3
"""Values of an outcome without which it says nothing."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What one trace says."""

    trace: str
    series: Mapping[str, Series]
    outcome: Outcome | None
    """The one that is judged: an evaluation if there is one, else the reward."""
    outcomes: tuple[Outcome, ...]
    """All that could be: the evaluations, then the reward."""
    fall: Fall | None
    gap: RunMismatch | None
    checked: CheckResult | None
    """What `check` says of train:rollout; None where nothing compares."""
    database: Database
    """Where the sequences are read from, when they are asked for: where nothing fell, nobody does."""
    pair: Pair
    settings: Mapping[str, Any]
    """Hyperparameters by name: numbers, or texts."""
    notes: tuple[str, ...]

    @cached_property
    def changes(self) -> Mapping[str, list[ChangePoint]]:
        """Of each series, where it changed; worked out when a fall asks for it."""
        return {name: change_points(one) for name, one in self.series.items()}

    @property
    def rollouts(self) -> Rollouts:
        """The sequences, and how likely each was."""
        return read_rollouts(self.database, self.pair)

    @property
    def steps(self) -> np.ndarray:
        """[n] int64: the steps of the run."""
        found = next(iter(self.series.values()), None)
        return np.empty(0, np.int64) if found is None else found.steps

    def values(self, name: str) -> np.ndarray:
        """[n] of a series, NaN where it has none; all NaN where it was not recorded."""
        found = self.series.get(name)
        return np.full(len(self.steps), np.nan) if found is None else found.values

    @cached_property
    def since_fall(self) -> Rollouts:
        """The sequences from where the fall may begin on; all of them where none fell."""
        return self.rollouts if self.fall is None else self.rollouts.since(self.fall.low)

    @cached_property
    def repeats(self) -> Repeats:
        """What responses that came again since then say of the rewards."""
        return repeats(self.since_fall)

    @cached_property
    def pays_length(self) -> float:
        """Correlation of length and reward within groups where the fall begins, while lengths differ; else since then."""
        found = relation(self.around_fall(), "length", "reward").correlation
        return relation(self.since_fall, "length", "reward").correlation if math.isnan(found) else found

    @cached_property
    def reward_beside(self) -> tuple[float, float] | None:
        """The recorded reward before the fall of an evaluation and at the end; None where no evaluation is judged."""
        values = self.values("reward")
        known = np.flatnonzero(np.isfinite(values))
        if self.outcome is None or not self.outcome.is_evaluation or self.fall is None or len(known) < 9:
            return None
        width = max(len(known) // 10, 3)
        until = known[self.steps[known] <= max(self.fall.step, self.steps[known[2]])]
        return float(values[until][-width:].mean()), float(values[known[-width:]].mean())

    @cached_property
    def hides(self) -> bool:
        """Whether the recorded reward did not fall with the evaluation."""
        if self.reward_beside is None or self.fall is None:
            return False
        before, after = self.reward_beside
        return (before - after) / max(abs(before), 1e-12) < t.HIDDEN * self.fall.share

    @cached_property
    def drop(self) -> Drop | None:
        """Whether the reward drops from one step to the next, with the policy or without it; an engine that is far from the
        trainer may do so by itself."""
        is_far = self.gap is not None and self.gap.size > t.LARGE_GAP
        return None if is_far else read_drop(self.series, self.rollouts, self.fall)

    @cached_property
    def echo(self) -> StaleWeights | None:
        """Whether the gap is that of weights some steps behind."""
        values = self.values("mean_abs_d")
        return None if self.gap is None else read_stale_weights(self.rollouts, float(np.nanmean(values)))

    def beside(self, control: Facts) -> Facts:
        """The same with the fall that is seen beside a control only, if there is one."""
        alike = [
            (own, other) for own in self.outcomes for other in control.outcomes
            if own.name == other.name and own.is_evaluation == (self.outcome is not None and self.outcome.is_evaluation)
        ]  # fmt: skip
        fall = next((fall for own, other in alike if (fall := find_fall(own, other))), None)
        return self if fall is None else replace(self, fall=fall, gap=read_run_mismatch(self.series, fall))

    def around_fall(self) -> Rollouts:
        """Those of a tenth of the run from there on, while the policy still knows something."""
        if self.fall is None:
            return self.rollouts
        return self.since_fall.until(self.fall.low + max(len(self.steps) // 10, 5))


def read_facts(trace: str | os.PathLike[str] | Database, pair: tuple[str, str], *, is_control: bool = False) -> Facts:
    """Read a trace; of a control nobody asks for a check, so that it is left out. Raises TraceNotFound, NewerTrace or DamagedTrace."""
    database = opened(trace)
    name = database.given[0]
    notes: list[str] = []
    series = read_series(database, pair=pair)
    outcomes = _outcomes(database, series)
    falls = [find_fall(outcome) for outcome in outcomes]
    outcome = outcomes[0] if outcomes else None
    fall = falls[0] if falls else None
    if outcome is not None and outcome.is_evaluation and not outcomes[-1].is_evaluation:
        fall = _agreed(outcome, fall, falls[-1])
    if outcome is None:
        notes.append(
            f"neither a reward nor an evaluation was recorded at {_FEWEST_VALUES} steps or more, so that no fall can be seen"
        )
    elif not outcome.is_evaluation:
        notes.append("no evaluation was logged (a metric such as eval/reward): a wrong reward hides a fall, since the "
                     "reward that was recorded is the wrong one")  # fmt: skip
    return Facts(
        trace=name,
        series=series,
        outcome=outcome,
        outcomes=outcomes,
        fall=fall,
        gap=read_run_mismatch(series, fall),
        checked=None if is_control else _checked(database, pair, name, notes),
        database=database,
        pair=pair,
        settings=read_settings(database),
        notes=tuple(notes),
    )


def _outcomes(database: Database, series: Mapping[str, Series]) -> tuple[Outcome, ...]:
    table = database.connection.sql(_METRICS).to_arrow_table()
    names, steps, values = (table[name].to_numpy() for name in ("name", "step", "value"))
    names = names.astype(str)
    found = []
    rewards = database.connection.sql(_REWARDS).to_arrow_table()["reward"].to_numpy()
    floor = min(float(np.quantile(rewards, 0.01)), 0.0) if len(rewards) else 0.0
    for name in np.unique(names):
        if is_evaluation(str(name)):
            of_name = names == name
            found.append(_outcome(str(name), steps[of_name], values[of_name], floor, is_evaluation=True))
    reward = series.get("reward")
    if reward is not None:
        found.append(_outcome("reward", reward.steps, reward.values, floor, is_evaluation=False))
    known = (each for each in found if len(each.steps) >= _FEWEST_VALUES)
    return tuple(sorted(known, key=lambda each: not each.is_evaluation))


def _outcome(name: str, steps: np.ndarray, values: np.ndarray, floor: float, *, is_evaluation: bool) -> Outcome:
    known = np.isfinite(values)
    # An evaluation may be on a scale of its own: shares of right answers, while rewards go down to -1.
    own = floor if not is_evaluation or (known.any() and values[known].min() < 0) else 0.0
    return Outcome(
        name=name, steps=steps[known].astype(np.int64), values=values[known], is_evaluation=is_evaluation, floor=own
    )


def _agreed(evaluation: Outcome, fall: Fall | None, of_reward: Fall | None) -> Fall | None:
    """The fall of an evaluation, with the reward's onset; the reward's own where the evaluation lost as much, unsure.

    And where the reward fell before there were two evaluations that could have shown it.
    """
    if fall is not None:
        return refined(fall, of_reward)
    if of_reward is not None and of_reward.fallen < evaluation.steps[min(1, len(evaluation.steps) - 1)]:
        return of_reward
    return of_reward if lost_share(evaluation) > t.FALL_SHARE else None


def _checked(database: Database, pair: tuple[str, str], trace: str, notes: list[str]) -> CheckResult | None:
    try:
        return judge(gather(database, pair, trace=trace), ":".join(pair))
    except NothingToCompare:
        notes.append(f"the passes {pair[0]} and {pair[1]} share no token, so that nothing can be said of a mismatch")
    except TimTraceError as error:
        notes.append(f"check could not be asked: {error}")
    return None
