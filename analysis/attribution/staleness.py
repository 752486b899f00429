"""Whether the engine says what the trainer said some steps before: what weights that are behind do, and no others.

Shapes: N sequences, M openings of responses, one a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from . import thresholds as t
from .rollouts import Rollouts

_FARTHEST = 64
"""Steps that are looked back."""
_AROUND = 1
"""Distances beside each whose openings are taken together with its own."""
_FEWEST = 30
"""Openings that have to come again at a distance for it to be judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StaleWeights:
    """The engine's logprobs of openings against the trainer's of the same openings some steps before."""

    steps: int
    """The distance at which they agree best."""
    left: float
    """Of the gap that the same openings have at their own step, the share that is left there: 0 where the engine had those
    weights."""
    num_pairs: int
    """Openings that came at both steps."""
    farthest: int
    """The largest distance that could be judged."""

    @property
    def is_heard(self) -> bool:
        """Whether weights that are so many steps behind explain the gap."""
        return self.left < t.ECHO

    @property
    def is_missed(self) -> bool:
        """Whether no weights that are up to `farthest` steps behind do."""
        return not self.is_heard and self.farthest >= t.ECHO_REACHES


def read_stale_weights(rollouts: Rollouts, gap: float) -> StaleWeights | None:
    """Hold what the engine said of an opening against what the trainer said of it 1 to 64 steps before.

    The opening of a response has one logprob under one set of weights, whenever it is asked. `gap` is mean |d| of the run,
    nats. None where too few came again, or where openings have little of the gap.
    """
    opening, step, sampled, trained = _first_of_step(rollouts)
    if len(step) < _FEWEST or not np.abs(sampled - trained).mean() > t.ECHO_CARRIES * gap:
        return None
    sums = np.zeros((_FARTHEST, 3))
    key = opening * (int(step.max()) + 1) + step
    for back in range(1, _FARTHEST + 1):
        place = np.minimum(np.searchsorted(key, key - back), len(key) - 1)
        there = np.flatnonzero((key[place] == key - back) & (step >= back))
        own, before = np.abs(sampled[there] - trained[there]), np.abs(sampled[there] - trained[place[there]])
        sums[back - 1] = own.sum(), before.sum(), len(there)
    return _best(sums)


def _best(sums: np.ndarray) -> StaleWeights | None:
    """Of [_FARTHEST, 3] sums of the gap, of what is left and of openings the distance at which least is left."""
    together = np.stack([np.convolve(column, np.ones(2 * _AROUND + 1), mode="same") for column in sums.T], 1)
    # A distance of its own, so that neighbours alone do not carry one.
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
