"""Reduce a block of sequences to its compared tokens.

Shapes: T tokens of N sequences, concatenated; K terms of the loss; G segments of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...schemas.loss import TOKEN, Loss
from ..statistics.estimators import Array
from ..statistics.loss import log_ratios, log_used, log_weight
from ..trace.ragged import Block, Tokens
from .edges import bit_lengths

_LIKELY = 0.99
"""Probability from which tokens are excluded from the envelope, because their 1 - p is dominated by rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """Sums over non-empty segments; a segment is the tokens of one sequence in one position bin."""

    sums_GQ: Array
    """[G, 4] number of tokens, and sums of |d|, d squared and d."""
    position_G: np.ndarray
    """Position bin of each segment: 0, 1, 2 to 3, 4 to 7, ..."""
    length_G: np.ndarray
    """Length bin of the response that each segment belongs to: 1, 2 to 3, 4 to 7, ..."""
    row_G: np.ndarray
    """Index of the step that each segment belongs to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioTerms:
    """Loss terms with a non-zero advantage."""

    before_K: Array
    """ln(current / b) of each term, nats."""
    after_K: Array | None
    """Logarithm of the ratio that multiplies the advantage in the loss, per term; None if the loss is unknown."""
    positive_K: np.ndarray
    """bool: True if the advantage of the term is positive."""
    row_K: np.ndarray
    """Index of the step that each term belongs to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The compared tokens of some sequences."""

    d_T: Array
    """logprob(a) - logprob(b), nats."""
    size_T: Array
    """|d| of each token, nats."""
    p_T: Array
    """Probability of each token under pass b."""
    scaled: Array
    """|d| / (1 - p) of the tokens with p < 0.99."""
    entropy_T: Array | None
    row_N: np.ndarray
    """Index of each sequence's step."""
    num_N: np.ndarray
    """Number of compared tokens in each sequence."""
    segments: Segments
    terms: RatioTerms | None
    """The loss terms; None without advantages."""

    @property
    def row_T(self) -> np.ndarray | int:
        """Index of each token's step; a single number if all tokens belong to one step."""
        return int(self.row_N[0]) if self.row_N[0] == self.row_N[-1] else np.repeat(self.row_N, self.num_N)


def part_of(tokens: Tokens, block: Block, row_N: np.ndarray, loss: Loss | None) -> Part:
    """Return the compared tokens in a block of sequences."""
    sequences, span, starts_N = block
    cut = tokens.cut(sequences, span)
    a_T, b_T, now_T = cut.logprobs["a"], cut.logprobs["b"], cut.logprobs.get("now")
    with np.errstate(invalid="ignore"):
        d_T = a_T - b_T
    there_T = np.isfinite(d_T)
    if cut.counted_T is not None:
        there_T &= cut.counted_T
    num_N = lengths_N = cut.lengths_N
    entropy_T, advantage_T = cut.entropy_T, cut.advantage_T
    if advantage_T is None and cut.advantage_N is not None:
        advantage_T = np.repeat(cut.advantage_N, lengths_N)
    terms = None
    if advantage_T is not None:
        # Terms need the starts of whole sequences, so they are computed before tokens are dropped.
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
    """Return sums over segments; a segment ends where the position in the response reaches a power of two."""
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


def terms_of(
    loss: Loss | None, a_T: Array, b_T: Array, now_T: Array | None, advantage_T: Array, there_T: np.ndarray,
    starts_N: np.ndarray, row_N: np.ndarray,
) -> RatioTerms:  # fmt: skip
    """Return the loss terms of a block. Pass a is `train` and b is `rollout`; a also replaces `current` if `now_T` is
    None.

    Without a loss, ratios are per token. The ratio of a sequence covers its compared tokens and is paired with the mean
    of their advantages.
    """
    now_T = a_T if now_T is None else now_T
    with np.errstate(invalid="ignore"):
        before_T, moved_T = now_T - b_T, now_T - a_T
    there_T = there_T & np.isfinite(before_T)
    known_T = there_T & np.isfinite(advantage_T)
    lengths_N = np.diff(np.append(starts_N, len(a_T)))
    if loss is None or loss.level == TOKEN:
        kept_T = known_T & (advantage_T != 0)
        before_K, moved_K = before_T[kept_T], moved_T[kept_T]
        positive_K, row_K = advantage_T[kept_T] > 0, np.repeat(row_N, lengths_N)[kept_T]
    else:
        num_N = _total(there_T, starts_N)
        advantage_N = _total(np.where(known_T, advantage_T, 0.0), starts_N)
        kept_N = advantage_N != 0
        before_K, moved_K = (
            log_ratios(loss, np.where(there_T, values, 0.0), starts_N, num_N)[kept_N] for values in (before_T, moved_T)
        )
        positive_K, row_K = advantage_N[kept_N] > 0, row_N[kept_N]
    after_K = None if loss is None else log_weight(loss, log_used(loss, before_K, moved_K), positive_K)
    return RatioTerms(before_K=before_K, after_K=after_K, positive_K=positive_K, row_K=row_K)


def _total(values_T: np.ndarray, starts_N: np.ndarray) -> Array:
    return np.asarray(np.add.reduceat(values_T.astype(np.float64), starts_N))
