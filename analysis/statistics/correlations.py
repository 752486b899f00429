"""Compute correlations between two samples."""

from __future__ import annotations

from dataclasses import dataclass
from math import nan, sqrt

import numpy as np


def pearson(x: np.ndarray, y: np.ndarray) -> float:
    """Return Pearson's correlation; NaN for fewer than two values or a constant side.

    >>> pearson(np.array([1.0, 2.0]), np.array([3.0, 1.0]))
    -1.0
    """
    if len(x) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return float("nan")
    return float(np.corrcoef(x, y)[0, 1])


@dataclass(frozen=True, slots=True, kw_only=True)
class CoMoments:
    """Moments of paired samples x and y. Moments of separate parts can be added (Chan, Golub and LeVeque 1979)."""

    num: int
    mean_x: float
    mean_y: float
    spread_x: float
    """Sum of (x - mean_x)^2."""
    spread_y: float
    spread_xy: float
    """Sum of (x - mean_x) (y - mean_y)."""

    @classmethod
    def of(cls, x: np.ndarray, y: np.ndarray) -> CoMoments:
        """Return the moments of one part with at least one value."""
        # If all values are equal, a rounding error in the mean must not count as spread.
        mean_x, mean_y = (float(values[0] if np.ptp(values) == 0 else values.mean()) for values in (x, y))
        off_x, off_y = x - mean_x, y - mean_y
        return cls(
            num=len(x), mean_x=mean_x, mean_y=mean_y, spread_x=float(np.sum(off_x * off_x)), spread_y=float(np.sum(off_y * off_y)),
            spread_xy=float(np.sum(off_x * off_y)),
        )  # fmt: skip

    def __add__(self, other: CoMoments) -> CoMoments:
        num = self.num + other.num
        share, between = other.num / num, self.num * other.num / num
        step_x, step_y = other.mean_x - self.mean_x, other.mean_y - self.mean_y
        return CoMoments(
            num=num,
            mean_x=self.mean_x + step_x * share,
            mean_y=self.mean_y + step_y * share,
            spread_x=self.spread_x + other.spread_x + step_x * step_x * between,
            spread_y=self.spread_y + other.spread_y + step_y * step_y * between,
            spread_xy=self.spread_xy + other.spread_xy + step_x * step_y * between,
        )

    @property
    def correlation(self) -> float:
        """Pearson's correlation; NaN if one side is constant.

        >>> (CoMoments.of(np.array([1.0]), np.array([3.0])) + CoMoments.of(np.array([2.0]), np.array([1.0]))).correlation
        -1.0
        """
        if not self.spread_x or not self.spread_y:
            return nan
        return max(min(self.spread_xy / (sqrt(self.spread_x) * sqrt(self.spread_y)), 1.0), -1.0)
