"""Whether the engine's logprobs are the trainer's of some steps before, as with stale weights.

Shapes: N sequences, M openings of responses, one a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..statement import Measured
from . import thresholds as t
from .rollouts import CERTAIN_LOGPROB, Rollouts

_FARTHEST = 64
"""Steps that are looked back."""
_AROUND = 1
"""Neighbouring distances whose openings are pooled with those of each distance."""
_FEWEST = 30
"""Openings that have to come again at a distance for it to be judged."""
_SOON = 20
"""Steps within which an opening has to come again to tell whether the engine's weights are the same."""
_FEWEST_STILL = 4
_SAME_BITS = 1e-7
"""Nats by which the mean of a few equal float32 logprobs differs from itself at most."""
_SAME_LOGPROB = 1e-5
"""Nats by which an exact engine and its trainer differ at most under the same weights."""
_NEAR = 1e-4
"""The same where the weights of one step are looked at, which agree by chance in hardly an opening."""
_ASIDE = 3.0
"""Offset at which matches by chance are counted, in units of the tolerance of a match."""
_MOST_HELD = 5_000_000
"""Logprobs that are held against earlier ones at most; of more, openings are left out evenly."""
_FEWEST_OF_VERSION = 20
"""Openings that say whether the weights of one step are the engine's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StaleWeights:
    """The engine's logprobs of openings against the trainer's of the same openings some steps before."""

    steps: int
    """The distance at which they agree best."""
    left: float
    """Share of the mismatch of these openings left at that distance: 0 if the engine had those weights."""
    num_pairs: int
    """Openings that came at both steps."""
    farthest: int
    """The largest distance that could be judged."""

    @property
    def values(self) -> dict[str, Measured]:
        """The numbers of its evidence."""
        return {"distance": self.steps, "left_share": self.left, "num_openings": self.num_pairs}

    @property
    def explains(self) -> bool:
        """Whether weights that are `steps` behind explain the mismatch."""
        return self.left < t.STALE_LEFT

    @property
    def is_excluded(self) -> bool:
        """Whether no weights up to `farthest` steps behind explain it."""
        return not self.explains and self.farthest >= t.STALE_REACHES


def read_stale_weights(rollouts: Rollouts, mean_abs_d: float) -> StaleWeights | None:
    """Compare the engine's logprobs of openings with the trainer's of the same openings 1 to 64 steps before.

    The opening of a response has one logprob under one set of weights. `mean_abs_d` is that of the run, nats. None where too
    few openings repeat, or where they have little of the mismatch.
    """
    opening, step, sampled, trained = _first_of_step(rollouts)
    if len(step) < _FEWEST or not np.abs(sampled - trained).mean() > t.STALE_CARRIES * mean_abs_d:
        return None
    sums = np.zeros((_FARTHEST, 3))
    key = opening * (int(step.max()) + 1) + step
    for back in range(1, _FARTHEST + 1):
        place = np.minimum(np.searchsorted(key, key - back), len(key) - 1)
        rows = np.flatnonzero((key[place] == key - back) & (step >= back))
        same_step, before = np.abs(sampled[rows] - trained[rows]), np.abs(sampled[rows] - trained[place[rows]])
        sums[back - 1] = same_step.sum(), before.sum(), len(rows)
    return _best(sums)


@dataclass(frozen=True, slots=True, kw_only=True)
class StillEngine:
    """The engine's logprobs of openings that come again within a few steps, beside the trainer's of the same."""

    num_pairs: int
    still: float
    """Share of them to which the engine gives the same bits both times."""
    of_trainer: float
    """The share to which the trainer does."""

    @property
    def values(self) -> dict[str, Measured]:
        """The numbers of its evidence."""
        return {"num_openings": self.num_pairs, "still_share": self.still, "trainer_share": self.of_trainer}

    @property
    def explains(self) -> bool:
        """Whether the engine kept its weights while the trainer changed them."""
        return self.still >= t.STILL and self.of_trainer <= t.STILL_BY_CHANCE


def read_still_engine(rollouts: Rollouts, first: int) -> StillEngine | None:
    """Whether the engine's logprobs of equal openings stay the same bits from a step on; None where fewer than four come again."""
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
    """Openings that engine and trainer score differently, with the engine's logprobs looked up among the trainer's earlier ones."""

    num_pairs: int
    """Such openings that came before."""
    num_equal: int
    """Those whose logprob is the trainer's of some step before."""
    by_chance: int
    """Matches expected by chance, estimated by shifting the logprobs slightly."""
    version: int
    """The step whose weights agree best, or the number of steps before; 0 where no 20 openings can tell."""
    is_distance: bool
    """Whether `version` is a number of steps before."""
    agreement: float
    """Share of the openings that came there whose logprob is the trainer's of that step."""
    num_agreeing: int
    """The openings that came there."""

    @property
    def values(self) -> dict[str, Measured]:
        """The numbers of its evidence."""
        return {
            "num_openings": self.num_pairs, "num_equal": self.num_equal, "by_chance": self.by_chance,
            "version": self.version, "share": self.agreement, "num_agreeing": self.num_agreeing,
        }  # fmt: skip

    @property
    def is_one(self) -> bool:
        """Whether the engine had the weights of one step, or those of one distance."""
        return self.agreement >= t.EARLIER_AGREES

    @property
    def explains(self) -> bool:
        """Whether the engine had weights that the trainer had before, of one step or of several."""
        are_several = self.num_equal >= t.EARLIER_FEWEST and self.num_equal >= t.EARLIER_OVER_CHANCE * self.by_chance
        return self.is_one or are_several


def read_earlier_weights(rollouts: Rollouts, first: int) -> EarlierWeights | None:
    """Look for the engine's logprobs of openings, from a step on, among the trainer's of the same openings before.

    Only where the two sides differ: one replica of several may lag. None where none of these openings came before.
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
    # Every earlier logprob of each of these openings, and which row it is held against.
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


def _best(sums: np.ndarray) -> StaleWeights | None:
    """The distance at which least of the mismatch is left, from [_FARTHEST, 3] sums: mismatch, what is left, openings."""
    together = np.stack([np.convolve(column, np.ones(2 * _AROUND + 1), mode="same") for column in sums.T], 1)
    # A distance needs openings itself, not only at its neighbours.
    judged = np.flatnonzero((together[:, 2] >= _FEWEST) & (sums[:, 2] > 0) & (together[:, 0] > 0))
    if not len(judged):
        return None
    left = together[judged, 1] / together[judged, 0]
    best = int(np.argmin(left))
    return StaleWeights(
        steps=int(judged[best]) + 1,
        left=float(left[best]),
        num_pairs=int(together[judged[best], 2]),
        farthest=int(judged[-1]) + 1,
    )


def _first_of_step(rollouts: Rollouts) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """[M] opening and step, in their order, the engine's and the trainer's mean logprob."""
    known = np.isfinite(rollouts.opening_sampled) & np.isfinite(rollouts.opening_trained)
    opening = np.unique(rollouts.opening[known], return_inverse=True)[1].astype(np.int64)
    step = rollouts.step[known].astype(np.int64)
    order = np.lexsort((step, opening))
    opening, step = opening[order], step[order]
    first = np.r_[True, (opening[1:] != opening[:-1]) | (step[1:] != step[:-1])] if len(step) else np.empty(0, bool)
    sampled, trained = (column[known][order][first] for column in (rollouts.opening_sampled, rollouts.opening_trained))
    return opening[first], step[first], sampled, trained
