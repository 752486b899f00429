"""Detect rewards and logprobs that belong to other rows of the step, or to other prompts."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from ..statement import Measured
from . import thresholds as t
from .rollouts import FARTHEST, FEWEST_COMPARED, Rollouts, hash_pair, least_reward

_KEPT_STEPS = 8
"""Maximum number of steps compared before and after a step. Over so few steps, the policy hardly changes."""
_FEWEST_KEPT = 3
"""Minimum number of steps compared before and after a step."""
_PROMPTS_AWAY = 8
"""Largest offset, in prompts of the step, at which to look for the prompt that a response was graded against."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRows:
    """Sequences that trainer and engine score differently, compared with the engine's logprobs for other rows."""

    step: int
    num_other: int
    share: float
    """Share of sequences whose mean trainer logprob equals the engine's mean logprob for another row, or for the row at
    one fixed offset.
    """
    by_chance: float
    """Share of sequences that match by chance: with rows of the previous step, or the median over other offsets."""

    @property
    def explains(self) -> bool:
        """True if the logprobs belong to other rows of the step. With a low-entropy policy, nearly all must match."""
        is_all = 1 - self.share <= t.NONE_LEFT * (1 - self.by_chance)
        return (self.share >= t.OTHER_ROWS and self.by_chance <= t.OTHER_ROWS * self.share) or is_all

    @property
    def values(self) -> dict[str, Measured]:
        """The numbers reported with the evidence, by name."""
        return {"step": self.step, "num_responses": self.num_other, "share": self.share, "chance_share": self.by_chance}


def scored_rows(rollouts: Rollouts, step: int, least: float) -> ScoredRows | None:
    """Compare the trainer's mean logprobs from `step` on with the engine's mean logprobs for other rows.

    `least`: smallest difference between two mean logprobs, in nats, that counts. None if fewer than 30 sequences
    differ.
    """
    shifts = [by for by in range(-FARTHEST, FARTHEST + 1) if by]
    counts, beside = np.zeros(3, int), np.zeros(len(shifts))
    steps = np.unique(rollouts.step)
    for place in np.flatnonzero((steps >= step) & (steps < step + _KEPT_STEPS)):
        now, last = rollouts.at_step(int(steps[place])), rollouts.at_step(int(steps[max(place - 1, 0)]))
        other = np.flatnonzero(np.abs(now.likelihood - now.sampled) > least)
        counts += (
            len(other),
            is_near(now.likelihood[other], now.sampled, least).sum(),
            is_near(now.likelihood[other], last.sampled, least).sum(),
        )
        beside += [(np.abs(now.likelihood - np.roll(now.sampled, by))[other] <= least).sum() for by in shifts]
    if counts[0] < FEWEST_COMPARED:
        return None
    found = ScoredRows(
        step=step, num_other=int(counts[0]), share=float(counts[1] / counts[0]), by_chance=float(counts[2] / counts[0])
    )
    shares = beside / counts[0]
    of_one_shift = replace(found, share=float(shares.max()), by_chance=float(np.median(shares)))
    is_one_shift = of_one_shift.explains and of_one_shift.share >= t.MOST
    return of_one_shift if is_one_shift and not found.explains else found


def is_near(values: np.ndarray, known: np.ndarray, least: float) -> np.ndarray:
    """Return [n] bool: True for each of `values` within `least` of some known value."""
    known = np.sort(known[np.isfinite(known)])
    if not len(known):
        return np.zeros(len(values), bool)
    place = np.searchsorted(known, values)
    below, above = known[np.maximum(place - 1, 0)], known[np.minimum(place, len(known) - 1)]
    return np.asarray(np.minimum(np.abs(values - below), np.abs(values - above)) <= least)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReorderedRewards:
    """Responses whose reward changed, and whether their earlier reward is in another row of the step."""

    num_other: int
    """Number of repeated responses whose reward changed."""
    num_lacking: int
    """Number of earlier rewards that no row of their step has now; a lower bound."""
    lacking_by_chance: float
    """Number of rewards that would be missing if the changed rewards were random draws from all later rewards."""

    @property
    def is_permuted(self) -> bool:
        """True if each step still has the earlier rewards of its responses, but in other rows."""
        return (
            self.lacking_by_chance >= t.LACKING and self.num_lacking <= t.LACKING_OF_PERMUTED * self.lacking_by_chance
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRewards:
    """Comparison of the distributions of rewards before and after a step."""

    step: int
    mean_before: float
    mean: float
    apart: float
    """Kolmogorov-Smirnov distance between the rewards before and after the step, 0 to 1."""
    spread: float
    """Standard deviation of all compared rewards."""
    in_sd: float
    """Difference between the mean rewards before and after, in standard errors."""

    @property
    def are_same(self) -> bool:
        """True if the distribution of rewards is unchanged, so that changed rewards belong to other rows."""
        return self.apart <= t.SAME_REWARDS and (
            abs(self.in_sd) <= t.SAME_REWARDS_SD or abs(self.mean - self.mean_before) <= t.SAME_REWARDS * self.spread
        )


def kept_rewards(rollouts: Rollouts, step: int) -> KeptRewards | None:
    """Compare the rewards of up to eight steps before `step` with those of up to eight steps from `step` on.

    None if there are fewer than three steps on either side.
    """
    before, since = (
        rollouts.until(step - 1).since(step - _KEPT_STEPS),
        rollouts.since(step).until(step + _KEPT_STEPS - 1),
    )
    of_rows, of_steps = [], []
    for part in (before, since):
        known = np.isfinite(part.reward)
        steps, place = np.unique(part.step[known], return_inverse=True)
        of_rows.append(part.reward[known])
        of_steps.append(np.bincount(place, part.reward[known]) / np.maximum(np.bincount(place), 1))
        if len(steps) < _FEWEST_KEPT:
            return None
    from scipy.stats import ks_2samp  # importing it takes half a second

    error = math.sqrt(sum(float(means.var(ddof=1)) / len(means) for means in of_steps))
    difference = float(of_steps[1].mean() - of_steps[0].mean())
    return KeptRewards(
        step=step, mean_before=float(of_steps[0].mean()), mean=float(of_steps[1].mean()),
        apart=float(ks_2samp(*of_rows).statistic), spread=float(np.concatenate(of_rows).std()), in_sd=difference / max(error, 1e-12),
    )  # fmt: skip


def reordered_rewards(rollouts: Rollouts, step: int) -> ReorderedRewards:
    """For each step from `step` on, compare its rewards, in any order, with earlier rewards of identical responses."""
    least = least_reward(rollouts)
    known = _earned_before(rollouts, step)
    since = (rollouts.step >= step) & np.isfinite(rollouts.reward)
    other = since & (np.abs(rollouts.reward - known) > least)
    drawn = np.where(np.isfinite(known), known, rollouts.reward)
    drawn[other] = np.random.default_rng(0).choice(rollouts.reward[since], int(other.sum())) if other.any() else 0.0
    lacking, by_chance = 0, 0
    for at in np.unique(rollouts.step[other]):
        rows = since & (rollouts.step == at)
        earned = known[rows & np.isfinite(known)]
        lacking += _lacking(earned, rollouts.reward[rows], least)
        by_chance += _lacking(earned, drawn[rows], least)
    return ReorderedRewards(num_other=int(other.sum()), num_lacking=lacking, lacking_by_chance=by_chance)


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherPromptsRewards:
    """Responses with a reward that the same response got earlier under another prompt of the step."""

    shift: int
    """Offset from a response's own prompt to the prompt that it was graded against, in prompts of the step."""
    num_responses: int
    """Number of responses that got a reward under that prompt earlier."""
    equal: float
    """Share of these responses whose reward now equals that earlier one."""
    by_chance: float
    """Share of these responses expected to have equal rewards if rewards were random draws from all later rewards."""

    @property
    def explains(self) -> bool:
        """True if responses were graded against the prompt at offset `shift`."""
        return self.equal >= t.GRADED_ELSEWHERE and self.by_chance <= t.GRADED_BY_CHANCE


def rewards_of_other_prompts(rollouts: Rollouts, step: int) -> OtherPromptsRewards | None:
    """Compare rewards from `step` on with the rewards that the same responses got earlier under neighbouring prompts.

    None if no neighbouring prompt has 30 such responses.
    """
    least = least_reward(rollouts)
    since = (rollouts.step >= step) & np.isfinite(rollouts.reward)
    latest_first = np.flatnonzero((rollouts.step < step) & np.isfinite(rollouts.reward))[::-1]
    graded, place = np.unique(hash_pair(rollouts.prompt, rollouts.response)[latest_first], return_index=True)
    if not len(graded):
        return None
    earned, given = rollouts.reward[latest_first][place], np.sort(rollouts.reward[since])
    best: OtherPromptsRewards | None = None
    for shift in sorted((by for by in range(-_PROMPTS_AWAY, _PROMPTS_AWAY + 1) if by), key=abs):
        moved = _prompt_beside(rollouts, shift)
        rows = np.flatnonzero(since & (moved != rollouts.prompt))
        wanted = hash_pair(moved[rows], rollouts.response[rows])
        at = np.searchsorted(graded, wanted).clip(max=len(graded) - 1)
        came = graded[at] == wanted
        if came.sum() < FEWEST_COMPARED:
            continue
        before, now = earned[at[came]], rollouts.reward[rows[came]]
        alike = np.searchsorted(given, before + least, side="right") - np.searchsorted(given, before - least)
        equal = float((np.abs(now - before) <= least).mean())
        if best is None or equal > best.equal:
            best = OtherPromptsRewards(
                shift=shift, num_responses=int(came.sum()), equal=equal, by_chance=float(alike.mean()) / len(given)
            )
    return best


def _prompt_beside(rollouts: Rollouts, shift: int) -> np.ndarray:
    """Return for each row the prompt `shift` prompts after its own in the step, wrapping around, [N]."""
    starts_step = np.r_[True, rollouts.step[1:] != rollouts.step[:-1]]
    starts = starts_step | np.r_[True, rollouts.prompt[1:] != rollouts.prompt[:-1]]
    place = np.cumsum(starts) - 1
    prompts = rollouts.prompt[starts]
    first = place[starts_step][np.cumsum(starts_step) - 1]
    size = np.bincount(np.cumsum(starts_step)[starts] - 1)[np.cumsum(starts_step) - 1]
    beside: np.ndarray = prompts[first + (place - first + shift) % size]
    return beside


def _earned_before(rollouts: Rollouts, step: int) -> np.ndarray:
    """Return the latest reward [N] that the same response got before `step`; NaN if there is none."""
    _, number = np.unique(rollouts.whole, return_inverse=True)
    earned = np.full(int(number.max(initial=-1)) + 1, np.nan)
    before = (rollouts.step < step) & np.isfinite(rollouts.reward)
    earned[number[before]] = rollouts.reward[before]
    known: np.ndarray = earned[number]
    return known


def _lacking(wanted: np.ndarray, given: np.ndarray, least: float) -> int:
    """Return how many wanted values match none of the given ones; each given value can match only once."""
    given = np.sort(given)
    place, lacking = 0, 0
    for value in np.sort(wanted):
        place += int(np.searchsorted(given[place:], value - least))
        if place < len(given) and given[place] <= value + least:
            place += 1
        else:
            lacking += 1
    return lacking
