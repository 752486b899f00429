from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..facts.rollouts import successive
from ..trace.database import Database

_ROWS = """
SELECT step, hash(prompt_ids, response_ids) AS whole, reward
FROM (SELECT *, row_number() OVER () AS place FROM sequences)
ORDER BY step, place
"""
WINDOW = 20
"""Window length in steps. The window ends at the current step."""
FEWEST = 20
"""Minimum number of repeated responses in a window. With fewer, the share of different rewards is 0."""


class Repeats:
    def __init__(self) -> None:
        self._rows = np.empty(0, np.int64), np.empty(0, np.uint64), np.empty(0)

    def keep(self, database: Database, steps: Sequence[int]) -> None:
        """Add the rows of `database`, and drop earlier rows of `steps`."""
        found = database.connection.execute(_ROWS).fetchnumpy()
        reward = np.ma.filled(found["reward"].astype(np.float64), np.nan)
        left = ~np.isin(self._rows[0], steps)
        step, whole, rewards = (
            np.concatenate([before[left], np.asarray(added)])
            for before, added in zip(self._rows, (found["step"], found["whole"], reward), strict=True)
        )
        self._rows = step, whole, rewards

    def unequal(self) -> tuple[np.ndarray, np.ndarray]:
        step, whole, reward = self._rows
        if not len(step):
            return step, reward
        steps, place = np.unique(step, return_inverse=True)
        return steps, unequal_rewards(place, whole, reward, len(steps))


def unequal_rewards(place: np.ndarray, whole: np.ndarray, reward: np.ndarray, num_steps: int) -> np.ndarray:
    """Return, for each step, the share of repeated responses in the last WINDOW steps that got a different reward.

    Each reward is compared with the reward at the response's previous occurrence. `place` [N] are step indices,
    and `whole` [N] hashes of prompt and response. Rows are in recording order.
    """
    before, again = successive(whole, place)
    with np.errstate(invalid="ignore"):
        differs = np.abs(reward[again] - reward[before]) > 1e-6
    repeated, unequal = (
        np.bincount(place[again], weights, minlength=num_steps)
        for weights in (np.ones(len(again)), differs.astype(float))
    )
    total, apart = (np.convolve(each, np.ones(WINDOW))[:num_steps] for each in (repeated, unequal))
    return np.where(total >= FEWEST, apart / np.maximum(total, 1), 0.0)
