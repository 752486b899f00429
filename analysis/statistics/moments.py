"""Correlations, and sums of squares and products around means, in two passes to avoid cancellation, merged over sequences.

Chan, Golub and LeVeque 1983, Algorithms for computing the sample variance: the corrected two-pass algorithm.

Shapes: T tokens of N sequences, concatenated.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .estimators import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Centred:
    """Per-token values from which the mean over their sequence has been subtracted."""

    mean_N: Array
    """Mean over each sequence's counted tokens, 0 without any; exactly the value if all are equal."""
    off_T: Array
    """Values minus the mean over their sequence; 0 for tokens that do not count."""
    left_N: Array
    """Sum of `off_T` over each sequence, which differs from 0 by the rounding error of the mean."""


def centred(values_T: Array, starts_N: np.ndarray, num_N: Array, counted_T: np.ndarray | None = None) -> Centred:
    """Centre values per sequence; `num_N` tokens count, marked by `counted_T`, and the others have value 0."""
    divisor_N = np.maximum(num_N, 1)
    mean_N = np.add.reduceat(values_T, starts_N) / divisor_N
    off_T = values_T - repeated(mean_N, starts_N, len(values_T))
    if counted_T is not None:
        off_T *= counted_T
    left_N = np.add.reduceat(off_T, starts_N)
    return Centred(mean_N=mean_N + left_N / divisor_N, off_T=off_T, left_N=left_N)


def co_moment(one: Centred, other: Centred, starts_N: np.ndarray, num_N: Array) -> Array:
    """Return [N] sums of (x - mean x) (y - mean y) over the tokens of a sequence.

    >>> starts, num = np.array([0]), np.array([2.0])
    >>> x, y = (centred(np.array(values), starts, num) for values in ([1.0, 3.0], [2.0, 8.0]))
    >>> co_moment(x, y, starts, num).tolist()
    [6.0]
    """
    return np.asarray(
        np.add.reduceat(one.off_T * other.off_T, starts_N) - one.left_N * other.left_N / np.maximum(num_N, 1)
    )


def off_median(mean_N: Array, num_N: Array, place_N: np.ndarray) -> Array:
    """Return [N] differences of each sequence's mean from the median over its `place_N`; 0 if no token counts.

    Sums around this centre, n (mean - centre) and n (mean - centre)^2 plus the co-moments within sequences, add up over
    sequences without loss of precision.
    """
    off_N = np.zeros(len(mean_N))
    there_N = np.flatnonzero(num_N > 0)
    order = there_N[np.lexsort((mean_N[there_N], place_N[there_N]))]
    _, first, count = np.unique(place_N[order], return_index=True, return_counts=True)
    centre = mean_N[order[first + count // 2]]
    off_N[order] = mean_N[order] - np.repeat(centre, count)
    return off_N


def repeated(values_N: Array, starts_N: np.ndarray, num_tokens: int) -> Array:
    """Return each sequence's value [T], repeated for its tokens."""
    return np.repeat(values_N, np.diff(np.append(starts_N, num_tokens)))


def pearson(x: np.ndarray, y: np.ndarray) -> float:
    """Return Pearson's correlation; NaN for fewer than two values or a constant side.

    >>> pearson(np.array([1.0, 2.0]), np.array([3.0, 1.0]))
    -1.0
    """
    if len(x) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return float("nan")
    return float(np.corrcoef(x, y)[0, 1])
