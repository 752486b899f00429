"""How the learning rate of a run goes down."""

from __future__ import annotations

import math

from tim_trace.analysis.dynamics.length_decay import LengthDecay

_FLOOR = 0.1
"""Share of the first rate that is left at the end: that of the length-decay schedule, too."""


class Schedule:
    """What the learning rate of each step is multiplied by."""

    def __init__(self, name: str):
        """`name` is `constant`, `cosine` or `length_decay`."""
        self._name = name
        self._decay = LengthDecay(floor=_FLOOR)

    def observe(self, mean_length: float) -> None:
        """Take the mean response length of a step, in tokens, as `LengthDecayLR.step` does; it counts from the next step on."""
        self._decay.observe(mean_length)

    def factor(self, progress: float) -> float:
        """The factor of the step at a share of the run."""
        if self._name == "length_decay":
            return self._decay.scale
        if self._name == "cosine":
            return _FLOOR + (1 - _FLOOR) * (1 + math.cos(math.pi * progress)) / 2
        return 1.0
