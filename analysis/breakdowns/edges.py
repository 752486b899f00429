"""Bins of every axis."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..statistics.estimators import Array

NUM_PROBABILITIES = 40
NUM_DIFFERENCES = 41
NUM_RATIOS = 41
ENTROPIES_PER_NAT = 4
MAX_ENTROPIES = 64
"""Number of entropy bins; the last includes higher entropies (16 nats: nine million equally probable tokens)."""

SMALLEST = 1e-6
"""Half the width of an axis if all values are 0, nats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edges:
    """Bin edges, one more than bins; a bin includes its lower edge and excludes its upper one."""

    probability: Array
    """[X + 1] probability under pass b, 0 to 1; the last bin includes 1."""
    d: Array
    """[Y + 1] nats, symmetric about 0; the first and last bin include values outside."""
    position: np.ndarray
    """[B + 1] int64 0, 1, 2, 4, 8, ...: position in the response, from 0."""
    length: np.ndarray
    """[B + 1] int64 1, 2, 4, 8, ...: response tokens."""
    entropy: Array | None
    """[B + 1] nats, in steps of 0.25; None if no entropy was recorded."""
    ratio: Array | None
    """[R + 1] ln ratio, symmetric about 0; the first and last bin include values outside. None without advantages."""


def rounded_up(value: float) -> float:
    """Round up to two significant digits.

    >>> rounded_up(0.1234)
    0.13
    """
    if value <= 0:
        return SMALLEST
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(f"{math.ceil(value / unit) * unit:.2g}")


def per_unit(num_bins: int, reach: float) -> float:
    """Return the number of bins per nat of an axis from -reach to reach."""
    return num_bins / (2 * reach)


def bins_of(values: Array, *, low: float, per_unit: float, num: int) -> np.ndarray:
    """Return [T] int64 the bin of each value; values outside are in the first or last."""
    return np.asarray(np.clip((values - low) * per_unit, 0, num - 1).astype(np.int64))


def bit_lengths(values: np.ndarray) -> np.ndarray:
    """Return the number of binary digits of integers.

    >>> bit_lengths(np.array([0, 1, 2, 3, 4])).tolist()
    [0, 1, 2, 2, 3]
    """
    return np.asarray(np.frexp(values)[1].astype(np.int64))


def position_edges(longest: int) -> np.ndarray:
    """Return the edges of positions in responses of up to `longest` tokens."""
    return np.concatenate([[0], 1 << np.arange(int(bit_lengths(np.array(longest - 1))) + 1)]).astype(np.int64)


def length_edges(longest: int) -> np.ndarray:
    """Return the edges of lengths up to `longest`."""
    return np.asarray(1 << np.arange(int(bit_lengths(np.array(longest))) + 1), np.int64)
