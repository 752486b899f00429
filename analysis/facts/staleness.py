"""Detect stale weights: engine logprobs that equal the trainer's of earlier steps.

Shapes: N sequences, M openings (response prefixes), each at most once per step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..statement import Measured
from . import thresholds as t
from .rollouts import CERTAIN_LOGPROB, Rollouts

_SOON = 20
"""Maximum number of steps between two occurrences of a prefix that show whether the engine kept its weights."""
_FEWEST_STILL = 4
_SAME_BITS = 1e-7
"""Maximum difference, in nats, between two means of the same float32 logprobs."""
_SAME_LOGPROB = 1e-5
"""Maximum difference, in nats, between the logprobs of an exact engine and its trainer with the same weights."""
_NEAR = 1e-4
"""Maximum difference, in nats, between matching logprobs if only one step is compared, where chance matches are
rare.
"""
_ASIDE = 3.0
"""Offset, in units of the matching tolerance, at which logprobs are matched to count matches by chance."""
_MOST_HELD = 5_000_000
"""Maximum number of comparisons with earlier logprobs; above it, every k-th prefix is used."""
_FEWEST_OF_VERSION = 20
"""Minimum number of prefixes for a comparison with the trainer at one step, or at one distance in steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StillEngine:
    """Logprobs of prefixes that repeat a few steps apart, compared for engine and trainer."""

    num_pairs: int
    still: float
    """Share of these prefixes with bitwise identical logprobs from the engine at both steps."""
    of_trainer: float
    """Share of these prefixes with bitwise identical logprobs from the trainer at both steps."""

    @property
    def values(self) -> dict[str, Measured]:
        """The numbers reported with the evidence, by name."""
        return {"num_openings": self.num_pairs, "still_share": self.still, "trainer_share": self.of_trainer}

    @property
    def explains(self) -> bool:
        """True if the engine kept its weights while the trainer's changed."""
        return self.still >= t.STILL and self.of_trainer <= t.STILL_BY_CHANCE


def read_still_engine(rollouts: Rollouts, first: int) -> StillEngine | None:
    """Compare the logprobs of repeated prefixes from step `first` on; None if too few repeat."""
    opening, step, sampled, trained = _first_of_step(rollouts)
    again = (opening[1:] == opening[:-1]) & (step[1:] - step[:-1] <= _SOON) & (step[:-1] >= first)
    again &= (sampled[1:] < -CERTAIN_LOGPROB) & (trained[1:] < -CERTAIN_LOGPROB)
    if again.sum() < _FEWEST_STILL:
        return None
    moved = [np.abs(values[1:] - values[:-1])[again] for values in (sampled, trained)]
    still, of_trainer = (float((each <= _SAME_BITS).mean()) for each in moved)
    return StillEngine(num_pairs=int(again.sum()), still=still, of_trainer=of_trainer)


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierWeights:
    """Engine logprobs of prefixes that the trainer scores differently, looked up among earlier trainer logprobs."""

    num_pairs: int
    """Number of such prefixes that were also sampled at an earlier step."""
    num_equal: int
    """Number of them whose engine logprob equals the trainer's at some earlier step."""
    by_chance: int
    """Number of matches expected by chance: those found after shifting the logprobs slightly."""
    version: int
    """Trainer step that matches best, or its distance in steps (see `is_distance`); 0 if none has 20 prefixes."""
    is_distance: bool
    """True if `version` is a distance in steps, False if it is a step."""
    agreement: float
    """Share of the prefixes sampled at `version` whose engine logprob equals the trainer's there."""
    num_agreeing: int
    """Number of prefixes sampled at `version`."""

    @property
    def values(self) -> dict[str, Measured]:
        """The numbers reported with the evidence, by name."""
        return {
            "num_openings": self.num_pairs, "num_equal": self.num_equal, "by_chance": self.by_chance,
            "version": self.version, "share": self.agreement, "num_agreeing": self.num_agreeing,
        }  # fmt: skip

    @property
    def is_one(self) -> bool:
        """True if the engine had the trainer's weights of one step, or of one fixed number of steps earlier."""
        return self.agreement >= t.EARLIER_AGREES

    @property
    def explains(self) -> bool:
        """True if the engine had earlier trainer weights, of one step or of several."""
        are_several = self.num_equal >= t.EARLIER_FEWEST and self.num_equal >= t.EARLIER_OVER_CHANCE * self.by_chance
        return self.is_one or are_several


def read_earlier_weights(rollouts: Rollouts, first: int) -> EarlierWeights | None:
    """Look up the engine's logprobs of prefixes, from step `first` on, among the trainer's of earlier steps.

    Only prefixes that trainer and engine score differently are used, because one of several replicas may lag. None if
    none of them was sampled before.
    """
    opening, step, sampled, trained = _first_of_step(rollouts)
    off = (step >= first) & (np.abs(sampled - trained) > CERTAIN_LOGPROB) & (sampled < -CERTAIN_LOGPROB)
    starts = np.flatnonzero(np.r_[True, opening[1:] != opening[:-1]])
    since = starts[np.searchsorted(starts, np.arange(len(opening)), side="right") - 1] if len(starts) else starts
    rows = np.flatnonzero(off)
    rows = rows[rows > since[rows]]
    if not len(rows):
        return None
    rows = rows[:: -(-int((rows - since[rows]).sum()) // _MOST_HELD)]
    # All pairs of a row with an earlier row that has the same prefix.
    counts = rows - since[rows]
    at = np.repeat(rows, counts)
    before = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(since[rows], counts)
    apart = sampled[at] - trained[before]
    equal, aside = np.abs(apart) <= _SAME_LOGPROB, np.abs(apart + _ASIDE * _SAME_LOGPROB) <= _SAME_LOGPROB
    version, is_distance, agreement, num = 0, False, 0.0, 0
    for of_distance, key in ((True, step[at] - step[before]), (False, step[before])):
        keys, place = np.unique(key, return_inverse=True)
        total, close = np.bincount(place), np.bincount(place, np.abs(apart) <= _NEAR)
        share = np.where(total >= _FEWEST_OF_VERSION, close / np.maximum(total, 1), 0.0)
        best = int(share.argmax())
        if share[best] > agreement:
            version, is_distance, agreement, num = int(keys[best]), of_distance, float(share[best]), int(total[best])
    return EarlierWeights(
        num_pairs=len(rows), num_equal=len(np.unique(at[equal])), by_chance=len(np.unique(at[aside])), version=version,
        is_distance=is_distance, agreement=agreement, num_agreeing=num,
    )  # fmt: skip


def _first_of_step(rollouts: Rollouts) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return each prefix of a step once, sorted, as [M] arrays: prefix, step, mean engine and mean trainer logprob."""
    known = np.isfinite(rollouts.opening_sampled) & np.isfinite(rollouts.opening_trained)
    opening = np.unique(rollouts.opening[known], return_inverse=True)[1].astype(np.int64)
    step = rollouts.step[known].astype(np.int64)
    order = np.lexsort((step, opening))
    opening, step = opening[order], step[order]
    first = np.r_[True, (opening[1:] != opening[:-1]) | (step[1:] != step[:-1])] if len(step) else np.empty(0, bool)
    sampled, trained = (column[known][order][first] for column in (rollouts.opening_sampled, rollouts.opening_trained))
    return opening[first], step[first], sampled, trained
