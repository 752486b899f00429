"""A block of sequences, reduced to the tokens that are compared.

Shapes: T tokens of several sequences, one after the other; N sequences; K terms of the loss; G segments of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...schemas.loss import Loss
from ..statistics.estimators import Array
from .edges import bit_lengths
from .ratios import RatioTerms, terms_of
from .tokens import Tokens

_LIKELY = 0.99
"""Tokens of this probability and more say nothing of the envelope: their 1 - p is rounded away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """Tokens of one sequence whose positions are in one bin; every one has a token."""

    sums_GQ: Array
    """[G, 4] over the tokens: how many, |d|, d squared, d."""
    position_G: np.ndarray
    """Bin of the position: 0, 1, 2 to 3, 4 to 7, ..."""
    length_G: np.ndarray
    """Bin of the response's length: 1, 2 to 3, 4 to 7, ..."""
    row_G: np.ndarray
    """Number of the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The compared tokens of some sequences."""

    d_T: Array
    """logprob(a) - logprob(b), nats."""
    size_T: Array
    """|d|"""
    p_T: Array
    """Probability under pass b."""
    scaled: Array
    """|d| / (1 - p) of those tokens that are not nearly certain."""
    entropy_T: Array | None
    row_N: np.ndarray
    """Number of each sequence's step."""
    num_N: np.ndarray
    """Compared tokens of each sequence."""
    segments: Segments
    terms: RatioTerms | None
    """None where there are no advantages."""

    @property
    def row_T(self) -> np.ndarray | int:
        """Number of each token's step, one for all of them where they are of one step."""
        return int(self.row_N[0]) if self.row_N[0] == self.row_N[-1] else np.repeat(self.row_N, self.num_N)


def part_of(
    tokens: Tokens, sequences: slice, span: slice, starts_N: np.ndarray, row_N: np.ndarray, loss: Loss | None
) -> Part:
    """Compare the tokens of a block: `sequences` of all, their tokens, and where in these each sequence begins."""
    a_T, b_T = tokens.a_T[span].astype(np.float64), tokens.b_T[span].astype(np.float64)
    with np.errstate(invalid="ignore"):
        d_T = a_T - b_T
    there_T = np.isfinite(d_T)
    if tokens.mask_T is not None:
        there_T &= tokens.mask_T[span]
    lengths_N = tokens.lengths_N[sequences]
    num_N = lengths_N
    now_T, entropy_T, advantage_T = (
        None if values is None else values[span].astype(np.float64)
        for values in (tokens.now_T, tokens.entropy_T, tokens.advantage_T)
    )
    terms = None
    if advantage_T is not None:
        # Before others are left out: a term needs the starts of whole sequences.
        terms = terms_of(loss, a_T, b_T, now_T, advantage_T, there_T, starts_N, row_N[sequences])
    whole = bool(there_T.all())
    if not whole:
        num_N = np.add.reduceat(there_T.astype(np.int64), starts_N)
        d_T, b_T = d_T[there_T], b_T[there_T]
        entropy_T = None if entropy_T is None else entropy_T[there_T]
    p_T, size_T = np.exp(b_T), np.abs(d_T)
    far_T = p_T < _LIKELY
    segments = _segments(d_T, size_T, None if whole else there_T, starts_N, lengths_N, row_N[sequences])
    return Part(
        d_T=d_T, size_T=size_T, p_T=p_T, scaled=size_T[far_T] / (1.0 - p_T[far_T]), entropy_T=entropy_T, row_N=row_N[sequences],
        num_N=num_N, segments=segments, terms=terms,
    )  # fmt: skip


def _segments(
    d_T: Array,
    size_T: Array,
    there_T: np.ndarray | None,
    starts_N: np.ndarray,
    lengths_N: np.ndarray,
    row_N: np.ndarray,
) -> Segments:
    """Sums where positions pass a power of two; few additions, since whole segments are added at once."""
    bins_N = bit_lengths(lengths_N - 1) + 1
    sequence_G = np.repeat(np.arange(len(lengths_N)), bins_N)
    position_G = np.arange(len(sequence_G)) - np.repeat(np.cumsum(bins_N) - bins_N, bins_N)
    start_G = starts_N[sequence_G] + np.where(position_G > 0, 1 << np.maximum(position_G - 1, 0), 0)
    if there_T is None:
        num_G = np.diff(np.append(start_G, len(d_T)))
    else:
        num_G = np.add.reduceat(there_T.astype(np.int64), start_G)
        full_G = num_G > 0
        sequence_G, position_G, num_G = sequence_G[full_G], position_G[full_G], num_G[full_G]
        start_G = np.cumsum(num_G) - num_G
    sums = [num_G] + [np.add.reduceat(values, start_G) if len(num_G) else num_G for values in (size_T, d_T * d_T, d_T)]
    return Segments(
        sums_GQ=np.stack(sums, axis=1).astype(np.float64), position_G=position_G,
        length_G=bit_lengths(lengths_N)[sequence_G] - 1, row_G=row_N[sequence_G],
    )  # fmt: skip
