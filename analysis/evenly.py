"""Some of many, from the first to the last."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def evenly(steps: Sequence[int], most: int) -> list[int]:
    """At most so many of some steps, evenly spread from the first to the last; of one alone the first.

    >>> evenly([1, 2, 3, 4, 5], 3)
    [1, 3, 5]
    """
    if most <= 0 or not steps:
        return []
    places = np.unique(np.linspace(0, len(steps) - 1, min(most, len(steps))).round().astype(int))
    return [steps[place] for place in places]
