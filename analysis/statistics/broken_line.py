"""Find where a constant level turns into a linear decline to another level.

Shapes: N values, one per step, without gaps; E candidate ends of the decline.
"""

from __future__ import annotations

import numpy as np

from .intervals import f_quantile
from .location import REACH
from .noise import long_run_variance

_LARGEST_E = 12
"""Maximum number of end positions tried for a decline."""


def break_between(values: np.ndarray, before: float, after: float) -> tuple[int, int, int]:
    """Return the first index of a decline between two given levels, with its interval: (low, index, high).

    The index minimises the sum of squares. The 90 % interval contains the indices whose sum of squares is within the F
    quantile with 1 and N - 3 degrees of freedom.
    """
    n = len(values)
    costs = np.full(n, np.inf)
    for i in range(n - 2):
        fallen_EN = _fallen(i, n)
        costs[i] = np.square(values - before * (1 - fallen_EN) - after * fallen_EN).sum(axis=1).min()
    freedom = max(n - 3, 1)
    inside = np.flatnonzero(costs <= costs.min() * (1 + f_quantile(0.90, 1, freedom) / freedom))
    return int(inside[0]), int(np.argmin(costs)), int(inside[-1])


def break_interval(values: np.ndarray, deviation: float) -> tuple[int, int]:
    """Return the 95 % interval of the first index of a decline, with fitted levels and autocorrelated noise.

    `deviation` is a lower bound for the noise, see noise.level_deviation. Coverage: docs/evidence/intervals.md.
    """
    centred = values - values.mean()
    n = len(centred)
    costs, left = np.full(n, np.inf), centred
    for i in range(n - 2):
        fallen_EN = _fallen(i, n)
        fallen_EN -= fallen_EN.mean(axis=1, keepdims=True)
        size_E = fallen_EN @ centred / np.einsum("en,en->e", fallen_EN, fallen_EN)
        explained_E = size_E * (fallen_EN @ centred)
        best = int(np.argmax(explained_E))
        costs[i] = float(centred @ centred) - explained_E[best]
        if costs[i] <= costs.min():
            left = centred - size_E[best] * fallen_EN[best]
    variance = max(long_run_variance(left, 3), float(left @ left) / max(n - 4, 1), deviation**2)
    inside = np.flatnonzero(costs <= costs.min() + REACH * variance)
    return int(inside[0]), int(inside[-1])


def _fallen(start: int, n: int) -> np.ndarray:
    """Return the completed share [E, N] of a decline that begins at `start`, for each candidate end."""
    ends = np.unique(np.linspace(start + 1, n - 1, min(n - 1 - start, _LARGEST_E)).round().astype(int))
    return np.asarray(np.clip((np.arange(n) - start) / (ends[:, None] - start), 0.0, 1.0))
