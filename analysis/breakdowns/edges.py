"""Compute the bin edges of every axis."""

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
"""Number of entropy bins; the last one includes higher entropies (16 nats: nine million equally probable tokens)."""

SMALLEST = 1e-6
"""Half the width of an axis on which all values are 0, in nats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edges:
    """Bin edges, one more than there are bins; each bin includes its lower edge and excludes its upper one."""

    probability: Array
    """[X + 1] probability under pass b, from 0 to 1; the last bin includes 1."""
    d: Array
    """[Y + 1] values of d in nats, symmetric about 0; the first and last bins include values outside."""
    position: np.ndarray
    """[B + 1] int64 positions in the response: 0, 1, 2, 4, 8, ..."""
    length: np.ndarray
    """[B + 1] int64 response lengths in tokens: 1, 2, 4, 8, ..."""
    entropy: Array | None
    """[B + 1] entropies in nats, in steps of 0.25; None if no entropy was recorded."""
    ratio: Array | None
    """[R + 1] ln ratios, symmetric about 0; the first and last bins include values outside. None without advantages."""


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
    """Return the number of bins per nat for an axis from -reach to reach."""
    return num_bins / (2 * reach)


def bins_of(values: Array, *, low: float, per_unit: float, num: int) -> np.ndarray:
    """Return [T] int64 the bin of each value; values outside the range are in the first or last bin."""
    return np.asarray(np.clip((values - low) * per_unit, 0, num - 1).astype(np.int64))


def bit_lengths(values: np.ndarray) -> np.ndarray:
    """Return the number of binary digits of each integer.

    >>> bit_lengths(np.array([0, 1, 2, 3, 4])).tolist()
    [0, 1, 2, 2, 3]
    """
    return np.asarray(np.frexp(values)[1].astype(np.int64))


def position_edges(longest: int) -> np.ndarray:
    """Return the edges of position bins for responses of up to `longest` tokens."""
    return np.concatenate([[0], 1 << np.arange(int(bit_lengths(np.array(longest - 1))) + 1)]).astype(np.int64)


def length_edges(longest: int) -> np.ndarray:
    """Return the edges of length bins for responses of up to `longest` tokens."""
    return np.asarray(1 << np.arange(int(bit_lengths(np.array(longest))) + 1), np.int64)
