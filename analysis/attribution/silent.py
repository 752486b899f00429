"""Detect changes after which the recorded outcome can no longer show a drop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ..facts import thresholds as ft
from ..facts.fall import COLLAPSE, Fall
from ..facts.mismatch import read_run_mismatch
from ..facts.recorded import GIVEN, read_recorded
from ..facts.relations import correlation, length_correlation, step_interval
from ..facts.repeats import unequal_share
from ..facts.rollouts import Rollouts, least_reward, successive
from . import thresholds as t
from .advice import described
from .looks.inputs import other_endings
from .model import ALONE, BESIDE, judged
from .run_facts import Facts
from .suspect import Suspect
from .table import table, table_beside

_FEWEST_STEPS = 3
"""Minimum number of steps on each side of a step to compare how responses end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SilentChange:
    """A change after which the recorded reward no longer measures the trained policy, so a drop would go unnoticed."""

    suspects: tuple[Suspect, ...]
    """Possible suspects, most probable first. For a change that shows by itself, `unknown` is left out."""
    step: int
    """First step after the change."""
    low: int
    """First step of the 95 % confidence interval of the change; for a mismatch, the first step at which it is large."""
    high: int
    """Last step of the 95 % confidence interval of the change."""


def read_silent(facts: Facts, control: Facts | None = None) -> SilentChange | None:
    """Return the change in reward or sampling after which the reward no longer measures the policy, in a run with neither a
    drop nor an evaluation.

    None if the outcome dropped, an evaluation was logged, or there is no such change.
    """
    if facts.fall is not None or facts.outcome is None or facts.outcome.is_evaluation:
        return None
    beside = None if control is None else _reward_beside(facts, control)
    places = [place for place in (_reward(facts), _noise(facts), _policy(facts), beside) if place is not None]
    found = [_judged(facts, control if place is beside else None, *place) for place in places]
    return max(found, key=lambda change: change.suspects[0].probability, default=None)


def _judged(facts: Facts, control: Facts | None, step: int, low: int, high: int) -> SilentChange:
    at = supposed_at(facts, step)
    known = table(at)
    if control is None:
        suspects = judged(known, ALONE)
    else:
        suspects = judged((*known, *table_beside(at, control, known)[0]), BESIDE)
    # The change itself is certain, so something that was tested caused it.
    named = [suspect for suspect in suspects if suspect.code != "unknown"]
    total = sum(suspect.probability for suspect in named)
    shares = [replace(suspect, probability=suspect.probability / total) for suspect in named]
    return SilentChange(suspects=described(at, shares), step=step, low=low, high=high)


def _reward(facts: Facts) -> tuple[int, int, int] | None:
    """Return the step and interval from which identical responses consistently get a different reward."""
    found = facts.new_reward
    is_material = found is not None and not facts.rewards_lie_off and facts.reward_moved >= t.REWARD_MOVED
    if found is None or not is_material or (found.is_rescaled and not facts.pays_length_since):
        return None
    return found.step, found.low, found.high


def _noise(facts: Facts) -> tuple[int, int, int] | None:
    """Return the step and interval of reward noise larger than the earlier difference between best and worst response."""
    low, high, difference = _pairs(facts.rollouts)
    least = least_reward(facts.rollouts)
    differs = np.abs(difference) > least
    if not differs.any() or facts.rewards_lie_off:
        return None
    step, *interval = step_interval(differs, np.full(len(low), -1), high)
    before, since = facts.rollouts.until(step - 1), facts.rollouts.since(step)
    if not unequal_share(before, "reward", least) <= t.UNEQUAL or not unequal_share(since, "reward", least) > ft.MOST:
        return None
    apart = float(np.sqrt(np.mean(difference[low >= step] ** 2)))
    is_large = apart > float(np.nanmax(before.reward) - np.nanmin(before.reward))
    return (step, interval[0], interval[1]) if is_large else None


def _pairs(rollouts: Rollouts) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each pair of consecutive identical responses, return their two steps and the difference in reward."""
    one, two = successive(rollouts.whole, rollouts.step)
    difference = rollouts.reward[two] - rollouts.reward[one]
    known = np.isfinite(difference)
    return rollouts.step[one][known], rollouts.step[two][known], difference[known]


def _policy(facts: Facts) -> tuple[int, int, int] | None:
    """Return the step from which sampled tokens are unlikely under the trainer: the recorded reward belongs to another policy."""
    apart = -facts.values("mean_d")
    known = np.isfinite(apart)
    steps, apart = facts.steps[known], apart[known]
    width = max(len(steps) // 10, 5)
    below = np.flatnonzero(apart <= t.APART)
    place = int(below[-1]) + 1 if len(below) else 0
    if len(steps) - place < width:
        return None
    first, since = int(np.flatnonzero(apart > t.APART)[0]), int(steps[place])
    return since, int(steps[first]), since


def _reward_beside(facts: Facts, control: Facts) -> tuple[int, int, int] | None:
    """Return the step from which responses consistently get a different reward than in the baseline run."""
    a, b = facts.rollouts, control.rollouts
    least = least_reward(b)
    if not unequal_share(b, "reward", least) <= t.UNEQUAL or facts.rewards_lie_off:
        return None
    _, place = np.unique(b.whole, return_index=True)
    place = place[np.isfinite(b.reward[place])]
    at = np.searchsorted(b.whole[place], a.whole).clip(max=len(place) - 1)
    rows = (b.whole[place][at] == a.whole) & np.isfinite(a.reward)
    step, given, of_control = a.step[rows], a.reward[rows], b.reward[place][at][rows]
    differs = np.abs(given - of_control) > least
    if differs.sum() < t.FEW_CHANGED:
        return None
    first, *interval = step_interval(differs, np.full(len(step), -1), step)
    if not unequal_share(a.since(first), "reward", least) <= t.UNEQUAL:
        return None
    since = step >= first
    share = float(differs[since].mean())
    usual = max(float(of_control[since].std()), 1e-12)
    if float((given - of_control)[since].std()) < t.REWARD_MOVED * usual:
        return None
    chosen = since & differs
    by_length = length_correlation((given - of_control)[chosen], a.length[rows][chosen], step[chosen])
    is_by_length = share >= ft.MOST and abs(by_length) > ft.LENGTH_EXPLAINS
    is_other = share >= ft.MOST and correlation(given[since], of_control[since]) <= ft.SAME_ORDER
    return (first, interval[0], interval[1]) if is_by_length or is_other else None


def supposed_at(facts: Facts, step: int) -> Facts:
    """Return the facts as they would be if the run dropped at a step."""
    fall = Fall(
        outcome=facts.outcome.name if facts.outcome else "", onset_of="", kind=COLLAPSE, step=step, low=step, high=step + 1,
        interval=(step - 1, step + 1), fallen=step + int(ft.AHEAD), before=0.0, after=0.0, size_in_sd=0.0,
    )  # fmt: skip
    return replace(facts, fall=fall, mismatch=read_run_mismatch(facts.series, fall))


def broken_steps(facts: Facts) -> Iterator[int]:
    """Yield the steps at which the run's inputs or engine changed."""
    for change in read_recorded(facts.database, facts.pair):
        is_clear = change.size_in_sd is None or abs(change.size_in_sd) >= t.OF_NO_SCATTER
        if change.kind in GIVEN and is_clear and change.shape != "ramp":
            yield change.step
        if change.series == "mean_abs_d" and isinstance(change.after, float) and change.after >= t.MATERIAL_MISMATCH:
            yield change.step
    if (ending := ending_step(facts.rollouts)) is not None:
        yield ending
    if facts.changed_rewards is not None:
        yield facts.changed_rewards.step
    lag = np.abs(facts.values("version_lag"))
    known = np.flatnonzero(np.isfinite(lag))
    if len(known):
        grows = known[1:][np.diff(lag[known]) >= 1]
        yield from (int(facts.steps[place]) for place in grows[:1])


def ending_step(rollouts: Rollouts) -> int | None:
    """Return the first step from which responses end differently than in the first fifth of a run, or None."""
    steps = np.unique(rollouts.step)
    fifth = len(steps) // 5
    if fifth < _FEWEST_STEPS:
        return None
    steps, share = other_endings(rollouts, rollouts.until(int(steps[fifth - 1])))
    for at in range(fifth, len(steps) - _FEWEST_STEPS + 1):
        if np.median(share[:at]) <= t.OTHER_ENDINGS / 4 and share[at : at + _FEWEST_STEPS].min() >= t.OTHER_ENDINGS:
            return int(steps[at])
    return None
