"""The bins of every axis."""

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
"""Entropies of 16 nats and more are in one bin; that of nine million equally probable tokens is 16."""

SMALLEST = 1e-6
"""Half the width of an axis over values that are all 0, nats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edges:
    """One more edge than there are bins; a bin holds its lower edge and not its upper one."""

    probability: Array
    """[X + 1] of the probability under pass b, 0 to 1; the last bin holds 1 as well."""
    d: Array
    """[Y + 1] nats, symmetric about 0; the first and the last bin hold what lies outside as well."""
    position: np.ndarray
    """[B + 1] int64 0, 1, 2, 4, 8, ...: place in the response, from 0."""
    length: np.ndarray
    """[B + 1] int64 1, 2, 4, 8, ...: response tokens."""
    entropy: Array | None
    """[B + 1] quarters of a nat; None where no entropy was recorded."""
    ratio: Array | None
    """[R + 1] of ln ratio, nats, symmetric about 0; the first and the last bin hold what lies outside as well. None where
    there are no advantages."""


def rounded_up(value: float) -> float:
    """The next number with two digits.

    >>> rounded_up(0.1234)
    0.13
    """
    if value <= 0:
        return SMALLEST
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(f"{math.ceil(value / unit) * unit:.2g}")


def per_unit(num_bins: int, reach: float) -> float:
    """Bins in one nat of an axis from -reach to reach."""
    return num_bins / (2 * reach)


def bins_of(values: Array, *, low: float, per_unit: float, num: int) -> np.ndarray:
    """[T] int64 bin of each value; what lies outside is in the first or the last."""
    return np.asarray(np.clip((values - low) * per_unit, 0, num - 1).astype(np.int64))


def bit_lengths(values: np.ndarray) -> np.ndarray:
    """Binary digits of whole numbers.

    >>> bit_lengths(np.array([0, 1, 2, 3, 4])).tolist()
    [0, 1, 2, 2, 3]
    """
    return np.asarray(np.frexp(values)[1].astype(np.int64))


def position_edges(longest: int) -> np.ndarray:
    """Of the positions in responses of up to this many tokens."""
    return np.concatenate([[0], 1 << np.arange(int(bit_lengths(np.array(longest - 1))) + 1)]).astype(np.int64)


def length_edges(longest: int) -> np.ndarray:
    """Of lengths up to this one."""
    return np.asarray(1 << np.arange(int(bit_lengths(np.array(longest))) + 1), np.int64)
