"""Samples of steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def evenly_spaced(steps: Sequence[int], most: int) -> list[int]:
    """Up to `most` evenly spaced steps, endpoints included; of one the first.

    >>> evenly_spaced([1, 2, 3, 4, 5], 3)
    [1, 3, 5]
    """
    if most <= 0 or not steps:
        return []
    places = np.unique(np.linspace(0, len(steps) - 1, min(most, len(steps))).round().astype(int))
    return [steps[place] for place in places]
