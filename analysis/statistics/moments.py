"""Correlations and centred sums, computed in two passes over the data and merged over sequences.

This is the corrected two-pass algorithm (Chan, Golub and LeVeque 1983, Algorithms for computing the sample variance).

Shapes: T tokens in N sequences, concatenated.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .estimators import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Centred:
    mean_N: Array
    """Mean over each sequence's counted tokens: exact if all values are equal, and 0 if no token is counted."""
    off_T: Array
    left_N: Array


def centred(values_T: Array, starts_N: np.ndarray, num_N: Array, counted_T: np.ndarray | None = None) -> Centred:
    """Subtract each sequence's mean from its values. The values of tokens outside `counted_T` must be 0."""
    divisor_N = np.maximum(num_N, 1)
    mean_N = np.add.reduceat(values_T, starts_N) / divisor_N
    off_T = values_T - repeated(mean_N, starts_N, len(values_T))
    if counted_T is not None:
        off_T *= counted_T
    left_N = np.add.reduceat(off_T, starts_N)
    return Centred(mean_N=mean_N + left_N / divisor_N, off_T=off_T, left_N=left_N)


def co_moment(one: Centred, other: Centred, starts_N: np.ndarray, num_N: Array) -> Array:
    """Return the sum of (x - mean x) (y - mean y) over the tokens of each sequence, [N].

    >>> starts, num = np.array([0]), np.array([2.0])
    >>> x, y = (centred(np.array(values), starts, num) for values in ([1.0, 3.0], [2.0, 8.0]))
    >>> co_moment(x, y, starts, num).tolist()
    [6.0]
    """
    return np.asarray(
        np.add.reduceat(one.off_T * other.off_T, starts_N) - one.left_N * other.left_N / np.maximum(num_N, 1)
    )


def off_median(mean_N: Array, num_N: Array, place_N: np.ndarray) -> Array:
    """Return each sequence's mean minus its group's median, [N]. `place_N` gives each sequence's group. Sequences
    without counted tokens get 0. These differences can be summed over sequences without losing precision."""
    off_N = np.zeros(len(mean_N))
    there_N = np.flatnonzero(num_N > 0)
    order = there_N[np.lexsort((mean_N[there_N], place_N[there_N]))]
    _, first, count = np.unique(place_N[order], return_index=True, return_counts=True)
    centre = mean_N[order[first + count // 2]]
    off_N[order] = mean_N[order] - np.repeat(centre, count)
    return off_N


def repeated(values_N: Array, starts_N: np.ndarray, num_tokens: int) -> Array:
    return np.repeat(values_N, np.diff(np.append(starts_N, num_tokens)))
