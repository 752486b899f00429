"""How the learning rate of a run goes down."""

from __future__ import annotations

import math

from tim_trace.analysis.dynamics.schedule import FACTOR, FLOOR, LengthSurge, decay_period


class Schedule:
    """What the learning rate of each step is multiplied by."""

    def __init__(self, name: str):
        """`name` is `constant`, `cosine` or `length_decay`."""
        self._name = name
        self._surge, self._scale = LengthSurge(), 1.0

    def observe(self, mean_length: float) -> None:
        """Take the mean response length of a step, in tokens, which counts from the next step on."""
        surge = self._surge
        surge.observe(mean_length)
        if surge.step is not None and surge.num_steps % decay_period(surge.step) == 0:
            self._scale = max(self._scale * FACTOR, FLOOR)

    def factor(self, progress: float) -> float:
        """The factor of the step at a share of the run."""
        if self._name == "length_decay":
            return self._scale
        if self._name == "cosine":
            return FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * progress)) / 2
        return 1.0
