"""Learning-rate schedules of a run."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

FACTOR, FLOOR = 0.5, 0.1
"""Factor of each decay, and lowest learning rate relative to the first one (arXiv 2602.01826, algorithm 1)."""


class Schedule:
    """Factor of each step's learning rate."""

    def __init__(self, name: str):
        """`name` is `constant`, `cosine` or `length_decay`."""
        self._name = name
        self._num_steps, self._surge_step, self._scale = 0, None, 1.0
        self._lengths: deque[float] = deque(maxlen=25)
        self._over: deque[bool] = deque(maxlen=5)

    def observe(self, mean_length: float) -> None:
        """Observe a step's mean response length, in tokens, which counts from the next step on."""
        self._num_steps += 1
        if self._surge_step is None:
            if len(self._lengths) == 25:
                self._over.append(mean_length >= 2 * median(list(self._lengths)[:20]) > 0)
                if sum(self._over) >= 3:
                    self._surge_step = self._num_steps
            self._lengths.append(mean_length)
        if self._surge_step is not None and self._num_steps % round(1.8 * self._surge_step) == 0:
            self._scale = max(self._scale * FACTOR, FLOOR)

    def factor(self, progress: float) -> float:
        """Return the factor of the step after a share of the run."""
        if self._name == "length_decay":
            return self._scale
        if self._name == "cosine":
            return FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * progress)) / 2
        return 1.0
