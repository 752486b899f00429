"""Measure how far the bias is concentrated on few terms, from counts and sums of |b| in bins an eighth of an octave
wide."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..statistics.estimators import Array

_SHIFT = 20
"""Number of low bits dropped from a float32, which leaves the sign, the exponent and three mantissa bits: eight bins
per octave."""

_LOWEST = (127 - 60) << 3
"""Bin number of 2^-60; smaller values count as 0."""

NUM_BINS = 100 << 3
"""Number of bins, from 2^-60 to 2^40."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Concentration:
    """How far sum |b| is concentrated on few terms. A term is what the loss clips: a token or a sequence."""

    half: float
    """Smallest share of the terms that together account for half of sum |b|."""
    ninety: float
    """Smallest share of the terms that together account for 90 % of sum |b|."""
    top_thousandth: float
    """Share of sum |b| contributed by the largest 0.1 % of the terms."""


CARRIED = {"half": "terms_for_half", "ninety": "terms_for_ninety", "top_thousandth": "in_top_thousandth"}
"""Field of Concentration -> its column name in tables."""


def bins_of(size: Array) -> np.ndarray:
    """Return the [T] bin number of each |b|; 0 for zero and for values below 2^-60."""
    bits = size.astype(np.float32).view(np.int32) >> _SHIFT
    return np.clip(bits - _LOWEST, 0, NUM_BINS - 1)


def concentration(bins: np.ndarray, num_terms: int) -> Concentration | None:
    """Return the concentration, given [2, NUM_BINS] counts and sums of |b|; None if no term has a bias.

    Terms in one bin are treated as equally large, so shares have an error of at most 9 %; they are exact if the bin at
    the threshold contains a single term.
    """
    counts, sums = bins[:, np.flatnonzero(bins[0])[::-1]]
    total = sums.sum()
    if not (total > 0 and np.isfinite(total)):
        return None
    before_counts, before_sums = np.cumsum(counts) - counts, np.cumsum(sums) - sums

    def terms_for(share: float) -> float:
        place = int(np.searchsorted(before_sums, share * total, "left")) - 1
        inside = (share * total - before_sums[place]) / (sums[place] / counts[place])
        return float(np.ceil(before_counts[place] + inside - 1e-6)) / num_terms

    def share_of(terms: float) -> float:
        place = max(int(np.searchsorted(before_counts, terms, "left")) - 1, 0)
        inside = min(terms - before_counts[place], counts[place]) * sums[place] / counts[place]
        return float((before_sums[place] + inside) / total)

    return Concentration(
        half=terms_for(0.5), ninety=terms_for(0.9), top_thousandth=share_of(float(np.ceil(0.001 * num_terms)))
    )


@dataclass(slots=True, kw_only=True)
class Carried:
    """Concentration of the bias in each update, i.e. (step, inner iteration), and over the whole run."""

    of_update: dict[tuple[int, int], Concentration | None] = field(default_factory=dict)
    run_bins: np.ndarray = field(default_factory=lambda: np.zeros((2, NUM_BINS)))
    num_terms: int = 0
    _open: dict[tuple[int, int], tuple[np.ndarray, int]] = field(default_factory=dict)
    _range: int = 0

    @property
    def of_run(self) -> Concentration | None:
        """Concentration over the updates of the whole run."""
        return concentration(self.run_bins, self.num_terms)

    def add(self, number: int, updates: list[tuple[int, int]], bins: np.ndarray, num_terms: np.ndarray) -> None:
        """Add a batch from step range `number`: [U, 2, NUM_BINS] counts and sums of |b|, and [U] numbers of terms.

        All updates of earlier step ranges must be complete when a new range begins.
        """
        if number != self._range:
            self.close()
            self._range = number
        for update, found, terms in zip(updates, bins, num_terms, strict=True):
            before, known = self._open.get(update, (np.zeros_like(found), 0))
            self._open[update] = (before + found, known + int(terms))

    def close(self) -> None:
        """Compute the concentration of all updates added before the call."""
        for update in sorted(self._open):
            bins, num_terms = self._open[update]
            self.of_update[update] = concentration(bins, num_terms)
            self.run_bins += bins
            self.num_terms += num_terms
        self._open.clear()
