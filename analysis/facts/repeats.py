"""Compare repeated responses: do they get the same reward, and are rewards in another row order?"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from . import thresholds as t
from .rollouts import CERTAIN_LOGPROB, FARTHEST, FEWEST_COMPARED, Rollouts, comparable, least_reward, successive

_LEAST_SORTED = 3
"""Minimum size of a group for a test whether its rewards are sorted."""
_EQUAL = 1e-4
"""Difference, in nats, up to which two logprobs of one prefix are equal; rounding depends on the batch shape."""
_FEWEST_IN_STEP = 20
"""Minimum number of pairs of identical responses within a step to compute their share of unequal values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedResponses:
    """Rewards of responses sampled twice; a deterministic reward is equal both times."""

    num_pairs: int
    unequal: float
    """Share of pairs with different rewards; NaN if there are no pairs."""
    shift: int
    """Row shift that leaves the fewest pairs with different rewards; 0 if rewards are in the right rows."""
    unequal_shifted: float
    """Share of pairs with different rewards after undoing `shift` or `order`."""
    mean_difference: float
    """Mean absolute difference over the pairs with different rewards."""
    order: str = ""
    """Row order in ORDERS that leaves the fewest pairs with different rewards; empty if a shift, or no change, leaves
    fewer.
    """

    @property
    def lies_off(self) -> bool:
        """True if undoing `shift` or `order` leaves far fewer pairs with different rewards."""
        return (self.shift != 0 or self.order != "") and self.unequal_shifted < t.UNEQUAL_SHIFTED * self.unequal


def repeated_responses(rollouts: Rollouts) -> RepeatedResponses:
    """Compare the rewards of repeated responses to a prompt, as recorded and in other row orders of the step."""
    pairs, least = successive(rollouts.whole, rollouts.step), least_reward(rollouts)
    num, unequal, mean_difference = _unequal(rollouts.reward, pairs, least)
    shift, unequal_shifted, other = 0, unequal, ""
    if unequal > 0:
        shares = {by: _unequal(_moved(rollouts, by), pairs, least)[1] for by in range(-FARTHEST, FARTHEST + 1)}
        shift = min(shares, key=lambda by: (shares[by], abs(by)))
        orders = {name: _unequal(rollouts.reward[_ordered(rollouts, name)], pairs, least)[1] for name in ORDERS}
        other = min(orders, key=orders.__getitem__)
        shift, other = (0, other) if orders[other] < shares[shift] else (shift, "")
        unequal_shifted = orders[other] if other else shares[shift]
    return RepeatedResponses(
        num_pairs=num,
        unequal=unequal,
        shift=shift,
        unequal_shifted=unequal_shifted,
        mean_difference=mean_difference,
        order=other,
    )


ORDERS = (
    "reversed", "reversed_in_groups", "members_first", "groups_first", "next_in_groups", "previous_in_groups", "halves",
    "shortest_first", "longest_first", "shortest_first_in_groups", "last_step",
)  # fmt: skip
"""Row orders that a bug may produce: the step reversed; each group reversed; first the first members of all groups, or
the inverse; each member replaced by the next or the last one in its group; the halves of the step swapped; ordered by
ascending or descending response length, in the step or in each group; the rewards of the previous step."""


def _ordered(rollouts: Rollouts, name: str) -> np.ndarray:
    """Return the index [N] of the row whose reward each row takes in the named order; its own index if groups differ in
    size.
    """
    firsts = np.flatnonzero(np.r_[True, rollouts.step[1:] != rollouts.step[:-1]])
    lasts = np.r_[firsts[1:], len(rollouts.step)]
    place = np.arange(len(rollouts.step))
    if name == "last_step":
        for first, last, end in zip(firsts, lasts, lasts[1:], strict=False):
            if last - first == end - last:  # the rewards of this step were recorded with the next one
                place[first:last] = np.arange(last, end)
        return place
    for first, last in zip(firsts, lasts, strict=True):
        rows, group = place[first:last].copy(), rollouts.group[first:last]
        if name in ("reversed", "halves"):
            place[first:last] = rows[::-1] if name == "reversed" else np.roll(rows, len(rows) // 2)
            continue
        if name in ("shortest_first", "longest_first", "shortest_first_in_groups"):
            length = rollouts.length[first:last] * (-1 if name == "longest_first" else 1)
            place[
                rows[np.lexsort((length, group)) if name.endswith("groups") else np.argsort(length, kind="stable")]
            ] = rows
            continue
        starts = np.flatnonzero(np.r_[True, group[1:] != group[:-1]])
        size = len(rows) // len(starts)
        if (np.diff(np.r_[starts, len(rows)]) != size).any():
            continue
        by_group = rows.reshape(-1, size)
        place[first:last] = {
            "reversed_in_groups": by_group[:, ::-1],
            "next_in_groups": np.roll(by_group, 1, axis=1),
            "previous_in_groups": np.roll(by_group, -1, axis=1),
            "members_first": by_group.T,
            "groups_first": rows.reshape(size, -1).T,
        }[name].reshape(-1)
    return place


def sorted_share(rollouts: Rollouts) -> tuple[float, float]:
    """Return the share of groups with sorted rewards (descending or ascending, whichever is larger), and the share
    expected by chance.

    Only groups with different rewards count; NaN if there are fewer than 30.
    """
    if not len(rollouts.group):
        return math.nan, math.nan
    starts = np.flatnonzero(np.r_[True, rollouts.group[1:] != rollouts.group[:-1]])
    falling = rising = num = 0
    by_chance = 0.0
    for first, last in zip(starts, np.r_[starts[1:], len(rollouts.group)], strict=True):
        rewards = rollouts.reward[first:last]
        if last - first < _LEAST_SORTED or not np.isfinite(rewards).all() or np.ptp(rewards) == 0:
            continue
        steps, counts = np.diff(rewards), np.unique(rewards, return_counts=True)[1]
        num, falling, rising = num + 1, falling + int((steps <= 0).all()), rising + int((steps >= 0).all())
        by_chance += math.exp(sum(math.lgamma(count + 1) for count in counts) - math.lgamma(last - first + 1))
    return (max(falling, rising) / num, by_chance / num) if num >= FEWEST_COMPARED else (math.nan, math.nan)


def _unequal(reward: np.ndarray, pairs: tuple[np.ndarray, np.ndarray], least: float) -> tuple[int, float, float]:
    """Return the number of pairs with known rewards, the share that differs by more than `least`, and the mean
    difference of these.
    """
    difference = _differences(reward, *pairs)
    if len(difference) < FEWEST_COMPARED:
        return 0, math.nan, math.nan
    differs = difference > least
    return len(difference), float(differs.mean()), float(difference[differs].mean()) if differs.any() else 0.0


def _differences(reward: np.ndarray, one: np.ndarray, two: np.ndarray) -> np.ndarray:
    """Return [M] absolute reward differences of the pairs whose rewards are known."""
    known = np.isfinite(reward[one]) & np.isfinite(reward[two])
    return np.asarray(np.abs(reward[two] - reward[one])[known])


def _moved(rollouts: Rollouts, shift: int) -> np.ndarray:
    """Return [N] rewards moved by `shift` rows within each step, wrapping around."""
    firsts = np.flatnonzero(np.r_[True, rollouts.step[1:] != rollouts.step[:-1]])
    sizes = np.diff(np.r_[firsts, len(rollouts.step)])
    first, size = np.repeat(firsts, sizes), np.repeat(sizes, sizes)
    moved: np.ndarray = rollouts.reward[first + (np.arange(len(first)) - first + shift) % size]
    return moved


def unequal_share(rollouts: Rollouts, column: str, least: float) -> float:
    """Return the share of repeated responses whose values differ by more than `least`; NaN with fewer than 30 pairs."""
    return _unequal(getattr(rollouts, column), successive(comparable(rollouts, column), rollouts.step), least)[1]


def unequal_in_step(rollouts: Rollouts) -> tuple[int, float]:
    """Return the number of pairs of identical responses to a prompt in a step, and the share with different rewards.

    If the reward depends only on the response, the share is 0. It is NaN with fewer than 20 pairs.
    """
    one, two = successive(rollouts.whole, rollouts.step)
    inside = rollouts.step[one] == rollouts.step[two]
    difference = _differences(rollouts.reward, one[inside], two[inside])
    is_enough = len(difference) >= _FEWEST_IN_STEP
    return len(difference), float((difference > least_reward(rollouts)).mean()) if is_enough else math.nan


def unequal_openings(rollouts: Rollouts) -> tuple[float, float]:
    """Return the share of identical prefixes within a step that get two different logprobs: from the engine, from the
    trainer.

    NaN with fewer than 20 pairs.
    """
    known = np.isfinite(rollouts.opening_sampled) & np.isfinite(rollouts.opening_trained)
    opening, step, sampled, trained = (
        values[known]
        for values in (rollouts.opening, rollouts.step, rollouts.opening_sampled, rollouts.opening_trained)
    )
    one, two = successive(opening, step)
    again = (step[one] == step[two]) & (trained[two] < -CERTAIN_LOGPROB)
    if again.sum() < _FEWEST_IN_STEP:
        return math.nan, math.nan
    of_engine, of_trainer = (
        float((np.abs(values[two] - values[one])[again] > _EQUAL).mean()) for values in (sampled, trained)
    )
    return of_engine, of_trainer
