"""Compute correlations between two samples."""

from __future__ import annotations

import numpy as np


def pearson(x: np.ndarray, y: np.ndarray) -> float:
    """Return Pearson's correlation; NaN for fewer than two values or a constant side.

    >>> pearson(np.array([1.0, 2.0]), np.array([3.0, 1.0]))
    -1.0
    """
    if len(x) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return float("nan")
    return float(np.corrcoef(x, y)[0, 1])
