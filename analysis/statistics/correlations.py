"""Correlations: of two samples, and of two series over lags.

Shapes: n values, one a step, without gaps; R series, L lags.
"""

from __future__ import annotations

import numpy as np

from .intervals import moving_blocks

_RESAMPLES = 400
_SEED = 0


def pearson(x: np.ndarray, y: np.ndarray) -> float:
    """Pearson's correlation; NaN of fewer than two values, or where one side has no spread.

    >>> pearson(np.array([1.0, 2.0]), np.array([3.0, 1.0]))
    -1.0
    """
    if len(x) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return float("nan")
    return float(np.corrcoef(x, y)[0, 1])


def leading_lag(x: np.ndarray, y: np.ndarray, reach: int) -> tuple[int, float, float] | None:
    """The lag, up to `reach` either way, at which the ranks of two series' step-to-step changes agree most.

    The lag, above 0 where x is ahead; the correlation there; and the chance of one as strong at any lag if nothing joined the
    two, whose null is a moving-block bootstrap of y. None where one of them does not change.
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
    """Ranks, of mean 0 and length 1; None where all are equal."""
    from scipy.stats import rankdata

    ranks = rankdata(values) - (len(values) + 1) / 2
    length = float(np.linalg.norm(ranks))
    return ranks / length if length > 0 else None


def _over_lags(x: np.ndarray, y: np.ndarray, reach: int) -> np.ndarray:
    """[R, L] sum over t of x_t y_{t + lag}, for lags from -reach to reach."""
    from scipy.signal import correlate

    whole = correlate(y, x[None], mode="full", method="fft")
    return np.asarray(whole[:, len(x) - 1 - reach : len(x) + reach])
