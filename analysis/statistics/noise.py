"""Measure a series' noise as its long-run variance, which is larger than the plain variance if the noise is
autocorrelated."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

_WINDOW = 7
_OUTLIER = 4.0
_CLIP = 3.0
_CORRELATION_MARGIN = 2.0
_MOST_CORRELATED = 0.97
_STANDARD_ERRORS = 1.5
ENOUGH = 40
"""Minimum number of values needed to distinguish autocorrelation from real changes."""


def tamed(values: np.ndarray) -> np.ndarray:
    """Clip each value to within 4 robust standard deviations of the median of the 7 values around it."""
    if len(values) < _WINDOW + 2:
        return values
    middle = running_median(values, _WINDOW, "reflect")
    apart = values - middle
    reach = _OUTLIER * robust_sd(apart)
    return np.asarray(middle + np.clip(apart, -reach, reach))


def robust_sd(values: np.ndarray) -> float:
    """Return 1.4826 times the median absolute deviation or, if this is 0, the ordinary standard deviation."""
    spread = 1.4826 * float(np.median(np.abs(values - np.median(values))))
    return spread if spread > 0 else float(np.std(values))


def long_run_variance(values: np.ndarray, num_fitted: int) -> float:
    """Return n times the variance of a stationary series' mean, after fitting `num_fitted` parameters.

    The result is the larger of two estimates:

    - The long-run variance of a first-order autoregression, variance (1 + phi) / (1 - phi). phi is the smaller of two
      estimates: from squared differences at lags 2 and 1 (robust to level changes: Chakar et al., Bernoulli 23, 2017),
      and from the residuals around a straight line.
    - The variance plus twice the autocovariances up to lag n^(1/3). This includes correlation over a few steps that the
      autoregression misses.
    """
    n = len(values)
    first = half_square_difference(values, 1)
    if first == 0.0:
        return 0.0
    from_differences = half_square_difference(values, 2) / first - 1 + _CORRELATION_MARGIN / math.sqrt(n)
    phi = max(0.0, min(_autocorrelation(values, num_fitted), from_differences, _MOST_CORRELATED))
    num_lags = int(min(n // 4, math.ceil(n ** (1 / 3))))
    differences = np.array([half_square_difference(values, lag) for lag in range(1, num_lags + 1)])
    variance = differences[-max(2, num_lags // 3) :].mean()
    return float(max(first * (1 + phi) / (1 - phi) ** 2, variance + 2 * np.sum(variance - differences)))


def highest_long_run_variance(values: np.ndarray, num_fitted: int) -> float:
    """Return the long-run variance to use for an interval. The autocorrelation is set 1.5 standard errors (1 / sqrt(n),
    Bartlett 1946) above its estimate: with 8 to 40 steps, the estimate is near 0 even in strongly correlated series,
    so that only 70% of the intervals based on it would contain the true value."""
    n = len(values)
    phi = max(0.0, _autocorrelation(values, num_fitted)) + _STANDARD_ERRORS / math.sqrt(n)
    phi = min(phi, _MOST_CORRELATED)
    variance = float(values @ values) / max(n - num_fitted, 1)
    return max(long_run_variance(values, num_fitted), variance * (1 + phi) / (1 - phi))


def level_deviation(values: np.ndarray) -> float:
    """Return sqrt(n) times the mean's standard deviation, unaffected by changes in level and slope. In a first-order
    autoregression with variance var, the expected value of (x[i-1] - 2 x[i] + x[i+1])^2 is var (6 - 8 phi + 2 phi^2),
    and the variance of the series' mean is var (1 + phi) / (1 - phi) / n."""
    n = len(values)
    phi = 0.0
    if n >= ENOUGH:
        left = values - running_median(values, n // 5, "edge")
        phi = float(left[1:] @ left[:-1]) / max(float(left @ left), 1e-300) + 5 / n
    phi = min(max(phi, 0.0), 0.9)
    scatter = robust_sd(values[:-2] - 2 * values[1:-1] + values[2:])
    return scatter * math.sqrt((1 + phi) / (1 - phi) / (6 - 8 * phi + 2 * phi**2))


def without_line(values: np.ndarray) -> np.ndarray:
    t = np.arange(len(values)) - (len(values) - 1) / 2
    return np.asarray(values - values.mean() - t * (t @ values) / max(float(t @ t), 1e-300))


def _autocorrelation(values: np.ndarray, num_fitted: int) -> float:
    """Return the lag-1 autocorrelation around a straight line, corrected for bias to first order."""
    left = without_line(values)
    phi = float(left[1:] @ left[:-1]) / max(float(left @ left), 1e-300)
    return phi + (num_fitted + 4 * phi) / len(values)


def half_square_difference(values: np.ndarray, lag: int) -> float:
    apart = values[lag:] - values[:-lag]
    apart = apart - np.median(apart)
    reach = _CLIP * robust_sd(apart)
    return float(np.mean(np.clip(apart, -reach, reach) ** 2)) / 2


def peaks(values: np.ndarray) -> np.ndarray:
    """Return the largest of each value and the two before it, which shows changes that only some steps have."""
    padded = np.pad(values, (2, 0), constant_values=-np.inf)
    return np.asarray(np.lib.stride_tricks.sliding_window_view(padded, 3).max(axis=-1))


def running_median(values: np.ndarray, width: int, beyond: Literal["reflect", "edge"]) -> np.ndarray:
    padded = np.pad(values, width // 2, mode=beyond)
    return np.asarray(np.median(np.lib.stride_tricks.sliding_window_view(padded, width), axis=-1)[: len(values)])
