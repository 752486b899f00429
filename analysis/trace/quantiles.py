"""Quantiles of |d|: exact for values in memory, otherwise from mergeable histograms.

A bin counts doubles with the same sign, exponent and first BITS mantissa bits (as in DDSketch: Masson, Rim and Lee
2019, VLDB 12). For 0 and normal doubles, a bin's middle is within relative error ERROR of |d|. Zero has its own bin.

Shapes: T tokens, B non-empty bins in ascending order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

SHARES = (0.5, 0.95, 0.99)

BITS = 9
ERROR = 2.0 ** -(BITS + 1)

_SHIFT = 52 - BITS
_DENSE_TOKENS = 1 << 16
_BLOCK_TOKENS = 1 << 20
_GATHERED = 1 << 22
"""If more values than this are kept, equal values are merged and counted to save memory."""

Cuts = tuple[float | None, ...]
Interpolate = Callable[[float, float, float], float]


def linear(below: float, above: float, share: float) -> float:
    return below + (above - below) * share


@dataclass(frozen=True, slots=True)
class Histogram:
    bins_B: np.ndarray
    counts_B: np.ndarray

    @classmethod
    def of(cls, abs_d_T: np.ndarray) -> Histogram:
        if len(abs_d_T) > _BLOCK_TOKENS:
            starts = range(0, len(abs_d_T), _BLOCK_TOKENS)
            return merged(cls.of(abs_d_T[start : start + _BLOCK_TOKENS]) for start in starts)
        bin_T = bins_of(abs_d_T)
        if len(bin_T) < _DENSE_TOKENS:
            bins_B, counts_B = np.unique(bin_T, return_counts=True)
            return cls(bins_B, counts_B)
        # Bin 0 is far below all other bins. Map it to just below the lowest of them, so that `counts` stays short.
        first = int(np.where(bin_T == 0, np.iinfo(np.int32).max, bin_T).min()) - 1
        counts = np.bincount(np.maximum(bin_T - first, 0))
        places = np.flatnonzero(counts)
        return cls(np.where(places == 0, 0, places + first).astype(np.int32), counts[places])

    @property
    def num_values(self) -> int:
        return int(self.counts_B.sum())

    def places(self) -> dict[int, int]:
        if not len(self.bins_B):
            return {}
        ends_B = np.cumsum(self.counts_B)
        places = [share * (self.num_values - 1) for share in SHARES]
        ranks = [rank for place in places for rank in (math.floor(place), math.ceil(place))]
        found = np.unique(np.searchsorted(ends_B, ranks, side="right"))
        return {int(self.bins_B[place]): int(ends_B[place] - self.counts_B[place]) for place in found}

    def cuts(self, largest: float = math.inf) -> Cuts:
        """Return the quantiles with a relative error of at most ERROR. None of them exceeds `largest`."""
        places = self.places()
        return _cuts(self.num_values, lambda rank: min(_middle(_bin_at(places, rank)), largest), linear)


def merged(histograms: Iterable[Histogram]) -> Histogram:
    """Add up the counts of several histograms.

    >>> merged([Histogram.of(np.array([0.5, 0.0])), Histogram.of(np.array([0.5]))]).counts_B.tolist()
    [1, 2]
    """
    return Histogram(*_counted([(part.bins_B, part.counts_B) for part in histograms]))


def bins_of(abs_d_T: np.ndarray) -> np.ndarray:
    """Return the bin of each value, int32 [T]. A larger value never gets a lower bin."""
    return (abs_d_T.view(np.int64) >> _SHIFT).astype(np.int32)


class Gathered:
    def __init__(self, histogram: Histogram):
        self._num_values = histogram.num_values
        self._places = histogram.places()
        self._parts: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {bin: [] for bin in self._places}
        self._num_kept = 0

    def add(self, abs_d_T: np.ndarray) -> None:
        bin_T = bins_of(abs_d_T)
        for bin, parts in self._parts.items():
            values = abs_d_T[bin_T == bin] if bin else np.zeros(0)  # bin 0 has only zeros
            parts.append((values, np.ones(len(values), np.int64)))
            self._num_kept += len(values)
        if self._num_kept > _GATHERED:
            self.count()

    def count(self) -> None:
        self._parts = {bin: [_counted(parts)] for bin, parts in self._parts.items()}
        self._num_kept = 0

    def take(self, other: Gathered) -> None:
        for bin, parts in other._parts.items():
            self._parts[bin] += parts
            self._num_kept += sum(len(values) for values, _ in parts)
        if self._num_kept > _GATHERED:
            self.count()

    def cuts(self, interpolate: Interpolate = linear) -> Cuts:
        """Return exact quantiles. All values counted in the histogram must have been added first."""
        counted = {bin: _counted(parts) for bin, parts in self._parts.items()}
        ends = {bin: np.cumsum(counts) for bin, (_, counts) in counted.items()}

        def at(rank: int) -> float:
            bin = _bin_at(self._places, rank)
            if bin == 0:
                return 0.0
            return float(counted[bin][0][np.searchsorted(ends[bin], rank - self._places[bin], side="right")])

        return _cuts(self._num_values, at, interpolate)


def quantiles(parts: Iterable[np.ndarray], histogram: Histogram, interpolate: Interpolate = linear) -> Cuts:
    """Return exact quantiles of values in memory, given their histogram.

    >>> values = np.array([0.0, 1.0, 2.0])
    >>> quantiles([values], Histogram.of(values))
    (1.0, 1.9, 1.98)
    """
    gathered = Gathered(histogram)
    for abs_d_T in parts:
        gathered.add(abs_d_T)
    return gathered.cuts(interpolate)


def quantile_cont(below: float, above: float, share: float) -> float:
    """Interpolate like DuckDB's quantile_cont: fma(below, 1 - share, above * share)."""
    return float(Fraction(below) * Fraction(1.0 - share) + Fraction(above * share))


def _counted(parts: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    if not parts:
        return np.zeros(0), np.zeros(0, np.int64)
    values, value_P = np.unique(np.concatenate([values for values, _ in parts]), return_inverse=True)
    counts = np.zeros(len(values), np.int64)
    np.add.at(counts, value_P, np.concatenate([counts for _, counts in parts]))
    return values, counts


def _bin_at(places: dict[int, int], rank: int) -> int:
    return max(bin for bin, before in places.items() if before <= rank)


def _middle(bin: int) -> float:
    if bin == 0:
        return 0.0
    low, high = np.array([bin, bin + 1], np.int64).__lshift__(_SHIFT).view(np.float64)
    return float((low + high) / 2)


def _cuts(num_values: int, at: Callable[[int], float], interpolate: Interpolate) -> Cuts:
    if not num_values:
        return tuple(None for _ in SHARES)
    found = []
    for share in SHARES:
        place = share * (num_values - 1)
        low, high = math.floor(place), math.ceil(place)
        found.append(at(low) if low == high else interpolate(at(low), at(high), place - low))
    return tuple(found)
