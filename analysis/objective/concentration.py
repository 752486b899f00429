"""How few terms carry the bias: counts and sums of |b| in bins that are an eighth of an octave wide."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..statistics.estimators import Array

_SHIFT = 20
"""Bits of a float32 below its sign, its exponent and three bits of its mantissa: eight bins an octave."""

_LOWEST = (127 - 60) << 3
"""The bin of 2^-60: what is smaller counts as nothing."""

NUM_BINS = 100 << 3
"""From 2^-60 to 2^40."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Concentration:
    """How few terms carry the sum of |b|. A term is what the loss clips: a token, or a sequence."""

    half: float
    """Share of the terms that carry half of it, the largest ones first."""
    ninety: float
    """Share of the terms that carry 90 %."""
    top_thousandth: float
    """Share of it in the top 0.1 % of the terms."""


CARRIED = {"half": "terms_for_half", "ninety": "terms_for_ninety", "top_thousandth": "in_top_thousandth"}
"""Field of a Concentration -> how tables call it."""


def bins_of(size: Array) -> np.ndarray:
    """[T] the bin of each |b|; 0 for what is 0, or too small to matter."""
    bits = size.astype(np.float32).view(np.int32) >> _SHIFT
    return np.clip(bits - _LOWEST, 0, NUM_BINS - 1)


def concentration(bins: np.ndarray, num_terms: int) -> Concentration | None:
    """From the [2, NUM_BINS] counts and sums of |b|; None where no term has a bias.

    Within the bin where a share is reached the terms count as alike, which they are to 9 %: shares that this gives are that
    near, and exact where the bin holds one term.
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
    """How few terms carry the bias: of each update, which is a (step, inner iteration), and of the run."""

    of_update: dict[tuple[int, int], Concentration | None] = field(default_factory=dict)
    run_bins: np.ndarray = field(default_factory=lambda: np.zeros((2, NUM_BINS)))
    num_terms: int = 0
    _open: dict[tuple[int, int], tuple[np.ndarray, int]] = field(default_factory=dict)
    _range: int = 0

    @property
    def of_run(self) -> Concentration | None:
        """Over all updates."""
        return concentration(self.run_bins, self.num_terms)

    def add(self, number: int, updates: list[tuple[int, int]], bins: np.ndarray, num_terms: np.ndarray) -> None:
        """Add the [U, 2, NUM_BINS] counts and sums and the numbers of terms of a batch, which is of range `number` of steps.

        Updates of ranges before it are complete.
        """
        if number != self._range:
            self.close()
            self._range = number
        for update, found, terms in zip(updates, bins, num_terms, strict=True):
            before, known = self._open.get(update, (np.zeros_like(found), 0))
            self._open[update] = (before + found, known + int(terms))

    def close(self) -> None:
        """Take all updates so far as complete."""
        for update in sorted(self._open):
            bins, num_terms = self._open[update]
            self.of_update[update] = concentration(bins, num_terms)
            self.run_bins += bins
            self.num_terms += num_terms
        self._open.clear()
