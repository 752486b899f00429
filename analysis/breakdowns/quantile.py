"""High quantiles of many values."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ..statistics.estimators import Array

_STRIDE = 64
"""Every how many values one is taken to guess where the quantile is."""


def high_quantile(parts: Sequence[Array], share: float) -> float | None:
    """The smallest of the values that this share of them does not exceed, as DuckDB's quantile_disc; None of no values.

    Only values above a guess are sorted: the guess is the same quantile of a few of them, a little lower.
    """
    num = sum(len(part) for part in parts)
    if not num:
        return None
    above = num - max(1, num - math.floor(num - share * num))
    few = np.sort(np.concatenate([part[::_STRIDE] for part in parts]))
    guess = few[max(0, int(len(few) * (1 - 2 * (1 - share))) - 8)]
    kept = np.concatenate([part[part >= guess] for part in parts])
    if len(kept) <= above:
        kept = np.concatenate(parts)
    place = len(kept) - 1 - above
    return float(np.partition(kept, place)[place])
