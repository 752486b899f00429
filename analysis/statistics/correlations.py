"""Compute correlations between two samples, and between two series over lags.

Shapes: n values, one per step, without gaps; R series, L lags.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import nan, sqrt

import numpy as np

from .intervals import moving_blocks

_RESAMPLES = 400
_SEED = 0


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


def leading_lag(x: np.ndarray, y: np.ndarray, reach: int) -> tuple[int, float, float] | None:
    """Return the lag, between -reach and reach, at which the ranks of two series' step-to-step changes correlate most.

    Returns the lag (positive: x is ahead), the correlation there, and the p-value of one as strong at any lag under a
    moving-block bootstrap of y. None if either series is constant.
    """
    ranks_x, ranks_y = _ranks(np.diff(x)), _ranks(np.diff(y))
    if ranks_x is None or ranks_y is None:
        return None
    by_lag = _over_lags(ranks_x, ranks_y[None], reach)[0]
    best = int(np.argmax(np.abs(by_lag)))
    blocks = ranks_y[moving_blocks(len(ranks_y), _RESAMPLES, _SEED)]
    blocks = blocks - blocks.mean(axis=1, keepdims=True)
    blocks /= np.maximum(np.linalg.norm(blocks, axis=1, keepdims=True), 1e-300)
    null = np.abs(_over_lags(ranks_x, blocks, reach)).max(axis=1)
    p = (1 + int((null >= abs(by_lag[best])).sum())) / (1 + len(null))
    return best - reach, float(by_lag[best]), p


def _ranks(values: np.ndarray) -> np.ndarray | None:
    """Return the ranks of the values, scaled to mean 0 and norm 1; None if all values are equal."""
    from scipy.stats import rankdata

    ranks = rankdata(values) - (len(values) + 1) / 2
    length = float(np.linalg.norm(ranks))
    return ranks / length if length > 0 else None


def _over_lags(x: np.ndarray, y: np.ndarray, reach: int) -> np.ndarray:
    """Return [R, L] sums over t of x_t y_{t + lag}, for lags from -reach to reach."""
    from scipy import fft  # scipy.signal.correlate gives the same bits but takes longer to import

    size = fft.next_fast_len(2 * len(x) - 1, real=True)
    whole = fft.irfft(fft.rfft(y, size) * fft.rfft(x[::-1], size), size)
    return np.asarray(whole[:, len(x) - 1 - reach : len(x) + reach])
