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
from ..facts.repeats import repeated_responses, unequal_share
from ..facts.rollouts import Rollouts, least_reward, successive
from . import thresholds as t
from .odds import ranked
from .run_facts import Facts
from .suspect import Evidence, Suspect
from .suspects.changed import of_changed
from .suspects.mismatch import mismatch
from .suspects.staleness import staleness
from .suspects.truncation import ending_step


@dataclass(frozen=True, slots=True, kw_only=True)
class SilentChange:
    """A change after which the recorded reward no longer measures the trained policy, so a drop would go unnoticed."""

    suspects: tuple[Suspect, ...]
    """Suspects for the change, most probable first; `unknown` stands for any other cause."""
    step: int
    """First step after the change."""
    low: int
    """First step of the 95 % confidence interval of the change; for a mismatch, the first step at which it is large."""
    high: int
    """Last step of the 95 % confidence interval of the change."""


def read_silent(facts: Facts, control: Facts | None = None) -> SilentChange | None:
    """Return the most probable change in reward or sampling, in a run with neither a drop nor an evaluation.

    None if the outcome dropped, an evaluation was logged, or no suspect is more probable than `unknown`.
    """
    if facts.fall is not None or facts.outcome is None or facts.outcome.is_evaluation:
        return None
    beside = None if control is None else _reward_beside(facts, control)
    found = [change for change in (_reward(facts), _noise(facts), _policy(facts), beside) if change is not None]
    found = [change for change in found if change.suspects[0].code != "unknown"]
    return max(found, key=lambda change: change.suspects[0].probability, default=None)


def _of(step: int, interval: tuple[int, int], *suspects: Suspect) -> SilentChange:
    unknown = Suspect(code="unknown", evidence=(t.prior("unknown"),))
    return SilentChange(suspects=ranked([*suspects, unknown]), step=step, low=interval[0], high=interval[1])


def _suspect(code: str, evidence: Evidence) -> Suspect:
    return Suspect(code=code, evidence=(evidence, t.prior(code)))


def _reward(facts: Facts) -> SilentChange | None:
    """Detect identical responses that consistently get a different reward from some step on."""
    found = facts.new_reward
    if (
        found is None
        or facts.rewards_lie_off
        or facts.reward_moved < t.REWARD_MOVED
        or (found.is_rescaled and not facts.pays_length_since)
    ):
        return None
    if facts.pays_length_since:
        values = {"correlation": facts.pays_length_since, "step": found.step, "num_responses": found.num_responses}
        evidence = Evidence(code="length_pays_since", values=values, points=t.CERTAIN)
        return _of(found.step, (found.low, found.high), _suspect("length", evidence))
    evidence = Evidence(code="rewards_changed", values=found.values, points=of_changed(found))
    return _of(found.step, (found.low, found.high), _suspect("reward", evidence))


def _noise(facts: Facts) -> SilentChange | None:
    """Detect reward noise that exceeds the earlier difference between the best and the worst response."""
    low, high, difference = _pairs(facts.rollouts)
    differs = np.abs(difference) > least_reward(facts.rollouts)
    if not differs.any() or facts.rewards_lie_off:
        return None
    step, *interval = step_interval(differs, np.full(len(low), -1), high)
    before, since = facts.rollouts.until(step - 1), facts.rollouts.since(step)
    least = least_reward(facts.rollouts)
    if not unequal_share(before, "reward", least) <= t.UNEQUAL or not unequal_share(since, "reward", least) > ft.MOST:
        return None
    apart = float(np.sqrt(np.mean(difference[low >= step] ** 2)))
    if apart <= float(np.nanmax(before.reward) - np.nanmin(before.reward)):
        return None
    repeated = repeated_responses(since)
    values = {
        "num_pairs": repeated.num_pairs,
        "unequal_share": repeated.unequal,
        "mean_difference": repeated.mean_difference,
    }
    evidence = Evidence(code="rewards_noisy", values=values, points=t.CERTAIN)
    return _of(step, (interval[0], interval[1]), _suspect("reward", evidence))


def _pairs(rollouts: Rollouts) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each pair of consecutive identical responses, return their two steps and the difference in reward."""
    one, two = successive(rollouts.whole, rollouts.step)
    difference = rollouts.reward[two] - rollouts.reward[one]
    known = np.isfinite(difference)
    return rollouts.step[one][known], rollouts.step[two][known], difference[known]


def _policy(facts: Facts) -> SilentChange | None:
    """Detect sampled tokens that the trainer finds unlikely: the recorded reward belongs to another policy."""
    apart = -facts.values("mean_d")
    known = np.isfinite(apart)
    steps, apart = facts.steps[known], apart[known]
    width = max(len(steps) // 10, 5)
    below = np.flatnonzero(apart <= t.APART)
    place = int(below[-1]) + 1 if len(below) else 0
    if len(steps) - place < width:
        return None
    first, since = int(np.flatnonzero(apart > t.APART)[0]), int(steps[place])
    evidence = Evidence(
        code="policies_apart", values={"step": since, "apart": float(np.median(apart[place:]))}, points=t.CERTAIN
    )
    suspects = (mismatch(facts), staleness(facts))
    told = [replace(suspect, evidence=(evidence, *suspect.evidence)) for suspect in suspects]
    return _of(since, (int(steps[first]), since), *told)


def _reward_beside(facts: Facts, control: Facts) -> SilentChange | None:
    """Detect responses that consistently get a different reward than in the baseline run, from some step on."""
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
    if share >= ft.MOST and abs(by_length) > ft.LENGTH_EXPLAINS:
        values = {"correlation": by_length, "step": first, "num_responses": int(since.sum())}
        evidence = Evidence(code="length_pays_since", values=values, points=t.CERTAIN)
        return _of(first, (interval[0], interval[1]), _suspect("length", evidence))
    if share < ft.MOST or correlation(given[since], of_control[since]) > ft.SAME_ORDER:
        return None
    values = {"step": first, "num_responses": int(since.sum()), "share": share}
    evidence = Evidence(code="rewards_not_the_controls", values=values, points=t.CERTAIN)
    return _of(first, (interval[0], interval[1]), _suspect("reward", evidence))


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
