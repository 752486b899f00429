"""The timeline of a run: when each series changed, and when its outcome fell. Every verb reads this one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from ..trace.cache import cached
from ..trace.database import Database
from ..trace.source import Pair
from .changes import ChangePoint, change_points
from .fall import Fall, Outcome, find_fall, is_evaluation, refined
from .read_series import read_series
from .series import Series

_METRICS = "SELECT step, name, value FROM metrics WHERE value IS NOT NULL AND name NOT LIKE 'hyperparameter/%' ORDER BY name, step"
_REWARDS = "SELECT reward FROM sequences WHERE isfinite(reward)"

MIN_VALUES = 3
"""Values of an outcome below which it is not judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcomes:
    """How well a run did, and whether that fell."""

    all: tuple[Outcome, ...]
    """The evaluations, then the reward."""
    fall: Fall | None
    """Of the first of them; its onset may be the reward's."""

    @property
    def judged(self) -> Outcome | None:
        """An evaluation if one was logged, else the reward."""
        return self.all[0] if self.all else None


@cached
def read_changes(database: Database, pair: Pair) -> dict[str, tuple[ChangePoint, ...]]:
    """The changes of every series of the one run that is open; where an outcome falls, with the onset of the fall."""
    fall = read_outcomes(database, pair).fall
    series = read_series(database, pair=pair)
    changes = {}
    with database.progress("finding changes", len(series)) as advance:
        for name, one in series.items():
            onset = fall if fall is not None and fall.onset_of == name else None
            changes[name] = with_onset(tuple(change_points(one)), onset)
            advance(1)
    return changes


def with_onset(changes: tuple[ChangePoint, ...], fall: Fall | None) -> tuple[ChangePoint, ...]:
    """Changes of an outcome; the descent at which it falls takes step and interval of the fall, so that there is one onset."""
    if fall is None:
        return changes
    first, last = fall.interval
    descents = [
        change for change in changes if change.after < change.before and change.low <= last and first <= change.high
    ]
    if not descents:
        return changes
    onset = min(descents, key=lambda change: abs(change.step - fall.step))
    return tuple(
        replace(change, step=fall.step, low=first, high=last) if change is onset else change for change in changes
    )


@cached
def read_outcomes(database: Database, pair: Pair) -> RunOutcomes:
    """The outcomes of the one run that is open, and the fall of the one that is judged."""
    outcomes = _outcomes(database, read_series(database, pair=pair))
    falls = [find_fall(outcome) for outcome in outcomes]
    fall = falls[0] if falls else None
    if outcomes and outcomes[0].is_evaluation and not outcomes[-1].is_evaluation:
        fall = _agreed(fall, falls[-1])
    return RunOutcomes(all=outcomes, fall=fall)


def _outcomes(database: Database, series: Mapping[str, Series]) -> tuple[Outcome, ...]:
    table = database.connection.sql(_METRICS).to_arrow_table()
    names, steps, values = (table[name].to_numpy() for name in ("name", "step", "value"))
    names = names.astype(str)
    outcomes = []
    rewards = database.connection.sql(_REWARDS).to_arrow_table()["reward"].to_numpy()
    floor = min(float(np.quantile(rewards, 0.01)), 0.0) if len(rewards) else 0.0
    for name in np.unique(names):
        if is_evaluation(str(name)):
            of_name = names == name
            outcomes.append(_outcome(str(name), steps[of_name], values[of_name], floor, is_evaluation=True))
    reward = series.get("reward")
    if reward is not None:
        outcomes.append(_outcome("reward", reward.steps, reward.values, floor, is_evaluation=False))
    known = (outcome for outcome in outcomes if len(outcome.steps) >= MIN_VALUES)
    return tuple(sorted(known, key=lambda outcome: not outcome.is_evaluation))


def _outcome(name: str, steps: np.ndarray, values: np.ndarray, floor: float, *, is_evaluation: bool) -> Outcome:
    known = np.isfinite(values)
    # An evaluation may be on a scale of its own: shares of right answers, while rewards go down to -1.
    has_floor = not is_evaluation or (known.any() and values[known].min() < 0)
    return Outcome(
        name=name, steps=steps[known].astype(np.int64), values=values[known], is_evaluation=is_evaluation,
        floor=floor if has_floor else 0.0,
    )  # fmt: skip


def _agreed(fall: Fall | None, of_reward: Fall | None) -> Fall | None:
    """The fall of an evaluation, with the reward's onset; the reward's own where the evaluation shows none: what was sampled
    is worse then, even where the policy holds."""
    if fall is not None:
        return refined(fall, of_reward)
    return of_reward
