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
        self._steps: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def keep(self, database: Database, steps: Sequence[int]) -> None:
        rows = database.connection.execute(_ROWS).fetchnumpy()
        step = np.asarray(rows["step"])
        reward = np.asarray(np.ma.filled(rows["reward"].astype(np.float64), np.nan))
        ends = np.flatnonzero(np.diff(step)) + 1
        for step_ in steps:
            self._steps.pop(step_, None)
        if len(step):
            parts = (np.split(each, ends) for each in (step, np.asarray(rows["whole"]), reward))
            for own, whole, rewards in zip(*parts, strict=True):
                self._steps[int(own[0])] = (whole, rewards)

    def unequal(self) -> tuple[np.ndarray, np.ndarray]:
        steps = np.array(sorted(self._steps), np.int64)
        if not len(steps):
            return steps, np.empty(0)
        parts = [self._steps[step] for step in steps.tolist()]
        place = np.repeat(np.arange(len(steps)), [len(whole) for whole, _ in parts])
        whole, reward = (np.concatenate([part[index] for part in parts]) for index in (0, 1))
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
