"""How much a series scatters by itself: its long-run variance, which autocorrelation makes larger than its variance.

Shapes: n values, one a step, without gaps.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

_WINDOW = 7
_OUTLIER = 4.0
_CLIP = 3.0
_CORRELATION_MARGIN = 2.0
_LAGS = 1.0
_MOST_CORRELATED = 0.97
_STANDARD_ERRORS = 1.5
ENOUGH = 40
"""Values from which autocorrelation can be told from what happens to the run."""


def tamed(values: np.ndarray) -> np.ndarray:
    """The series with single outliers, beyond 4 robust deviations from the median of 7 neighbours, moved in to there."""
    if len(values) < _WINDOW + 2:
        return values
    middle = running_median(values, _WINDOW, "reflect")
    apart = values - middle
    reach = _OUTLIER * robust_sd(apart)
    return np.asarray(middle + np.clip(apart, -reach, reach))


def robust_sd(values: np.ndarray) -> float:
    """The standard deviation by the median absolute one; the plain one where more than half of the values are equal.

    scipy.stats.median_abs_deviation gives the same in nine times the time.
    """
    spread = 1.4826 * float(np.median(np.abs(values - np.median(values))))
    return spread if spread > 0 else float(np.std(values))


def long_run_variance(values: np.ndarray, num_fitted: int) -> float:
    """n times the variance of the mean of a stationary series, of which `num_fitted` parameters were taken out.

    The larger of two estimates. As of a first-order autoregression, variance (1 + phi) / (1 - phi), where differences
    give variance (1 - phi) and phi, which a change of level leaves alone (Chakar et al., Bernoulli 23, 2017: the ratio
    of the squared differences at lags 2 and 1 less 1), or the residuals of a line if that phi is smaller. And as the
    variance plus twice the autocovariances up to lag n^(1/3), as differences at these lags give them, which sees
    correlation of a few steps that no autoregression of first order has; what wanders more slowly counts as movement.
    """
    n = len(values)
    first = half_square_difference(values, 1)
    if first == 0.0:
        return 0.0
    from_differences = half_square_difference(values, 2) / first - 1 + _CORRELATION_MARGIN / math.sqrt(n)
    phi = max(0.0, min(_autocorrelation(values, num_fitted), from_differences, _MOST_CORRELATED))
    num_lags = int(min(n // 4, math.ceil(_LAGS * n ** (1 / 3))))
    differences = np.array([half_square_difference(values, lag) for lag in range(1, num_lags + 1)])
    variance = differences[-max(2, num_lags // 3) :].mean()
    return float(max(first * (1 + phi) / (1 - phi) ** 2, variance + 2 * np.sum(variance - differences)))


def highest_long_run_variance(values: np.ndarray, num_fitted: int) -> float:
    """The long-run variance for an interval: no less than with an autocorrelation by 1.5 of its standard errors above its estimate.

    Of 8 to 40 steps the estimate is near 0 also where neighbours are much alike, and an interval with it holds the truth in
    70 % of such series. The standard error of an autocorrelation is 1 / sqrt(n) at most (Bartlett 1946).
    """
    n = len(values)
    phi = max(0.0, _autocorrelation(values, num_fitted)) + _STANDARD_ERRORS / math.sqrt(n)
    phi = min(phi, _MOST_CORRELATED)
    variance = float(values @ values) / max(n - num_fitted, 1)
    return max(long_run_variance(values, num_fitted), variance * (1 + phi) / (1 - phi))


def level_deviation(values: np.ndarray) -> float:
    """Standard deviation of a mean of n values, times sqrt(n): what they scatter by, whatever their level and slope do.

    Of a first-order autoregression the squares of x[i-1] - 2 x[i] + x[i+1] are var (6 - 8 phi + 2 phi^2) on average, and
    its mean varies by var (1 + phi) / (1 - phi) / n. phi is that of the residuals around a running median of a fifth of
    the series; of fewer than 40 values none is taken out.
    """
    n = len(values)
    phi = 0.0
    if n >= ENOUGH:
        left = values - running_median(values, n // 5, "edge")
        phi = float(left[1:] @ left[:-1]) / max(float(left @ left), 1e-300) + 5 / n
    phi = min(max(phi, 0.0), 0.9)
    scatter = robust_sd(values[:-2] - 2 * values[1:-1] + values[2:])
    return scatter * math.sqrt((1 + phi) / (1 - phi) / (6 - 8 * phi + 2 * phi**2))


def without_line(values: np.ndarray) -> np.ndarray:
    """The residuals of a straight line. scipy.signal.detrend gives the same in six times the time."""
    t = np.arange(len(values)) - (len(values) - 1) / 2
    return np.asarray(values - values.mean() - t * (t @ values) / max(float(t @ t), 1e-300))


def _autocorrelation(values: np.ndarray, num_fitted: int) -> float:
    """Of lag 1 after a straight line, with the first-order correction of its bias."""
    left = without_line(values)
    phi = float(left[1:] @ left[:-1]) / max(float(left @ left), 1e-300)
    return phi + (num_fitted + 4 * phi) / len(values)


def half_square_difference(values: np.ndarray, lag: int) -> float:
    """Half of the mean squared difference at a lag: variance less autocovariance; differences beyond 3 sd are cut."""
    apart = values[lag:] - values[:-lag]
    apart = apart - np.median(apart)
    reach = _CLIP * robust_sd(apart)
    return float(np.mean(np.clip(apart, -reach, reach) ** 2)) / 2


def running_median(values: np.ndarray, width: int, beyond: Literal["reflect", "edge"]) -> np.ndarray:
    """[n] the median of `width` neighbours of each value; `beyond` the ends they are mirrored, or the last is repeated.

    scipy's median filters take the upper of two middle values where the width is even.
    """
    padded = np.pad(values, width // 2, mode=beyond)
    return np.asarray(np.median(np.lib.stride_tricks.sliding_window_view(padded, width), axis=-1)[: len(values)])
