"""Probability intervals for distributions that are known in full, or only by their top K tokens and the tail's mass.

Shapes: C rows, K listed tokens, M columns: tokens listed by either side, or the whole vocabulary if one side is full.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from .divergence import Array, Full, entropy, log_softmax

MAX_LOGIT = 64.0
"""Largest logit (before temperature) whose rounding error the intervals cover."""
_ULP = 2.0**-23
_LARGEST_VOCABULARY = 2.0**31


@dataclass(frozen=True, slots=True)
class TopK:
    """Distributions known only by the logprobs of K tokens and the total mass of all other tokens."""

    ids_CK: Array
    logprobs_CK: Array
    """float64 logprobs of the listed tokens (nats)."""
    tail_C: Array
    """float64 log of the unlisted tokens' total mass."""
    temperature: float = 1.0
    """Temperature that the logits were divided by. Lower temperatures mean larger rounding errors."""

    def slack(self, logprobs: Array | float) -> Array:
        finite = np.where(np.isfinite(logprobs), np.abs(logprobs), 0.0)
        return np.asarray(_ULP * (MAX_LOGIT / min(self.temperature, 1.0) + 4 * finite))

    @property
    def intervals(self) -> tuple[Array, Array]:
        p_CK, slack_CK = np.exp(self.logprobs_CK), self.slack(self.logprobs_CK)
        return p_CK * np.exp(-slack_CK), np.minimum(p_CK * np.exp(slack_CK), 1.0)

    @property
    def tail(self) -> tuple[Array, Array]:
        """Return the unlisted tokens' smallest and largest possible total mass, [C]."""
        t_C, lost = np.exp(self.tail_C), float(self.slack(0.0))
        slack_C = self.slack(self.tail_C)
        low, high = self.intervals
        least = np.maximum(t_C * np.exp(-slack_C) - lost, 1 - high.sum(axis=1))
        most = np.minimum(t_C * np.exp(slack_C) + lost, 1 - low.sum(axis=1))
        # If the least probable listed token has no mass, the unlisted tokens have none either.
        most = np.where(high.min(axis=1) == 0, 0.0, np.clip(most, 0.0, 1.0))
        return np.clip(least, 0.0, most), most


@dataclass(frozen=True, slots=True)
class PartialDistribution:
    """Bounds on the probabilities of one side's tokens, in M columns."""

    lo_CM: Array
    """Smallest possible probability per listed token. 0 in other columns."""
    hi_CM: Array
    """Largest possible probability per listed token. 0 in other columns."""
    listed_CM: Array
    tail_lo_C: Array
    """Smallest possible total mass outside the list, including tokens without a column."""
    tail_hi_C: Array
    """Largest possible total mass outside the list."""
    cap_C: Array
    """Largest possible probability for an unlisted token."""


def columns(a: Full | TopK, b: Full | TopK) -> tuple[PartialDistribution, PartialDistribution, bool]:
    """Return both sides with the same columns, and whether some tokens may have no column.

    A top-K side does not record the vocabulary size, so it is taken from the other side if that one is full.
    """
    if isinstance(a, TopK) and isinstance(b, TopK):
        return *_merged(a, b), True
    full, part = (a, b) if isinstance(a, Full) else (b, a)
    assert isinstance(full, Full)
    assert isinstance(part, TopK)
    width = max(full.logits_CV.shape[1], int(part.ids_CK.max(initial=0)) + 1)
    sides = _known(full, width), _scattered(part, width)
    return (*sides, False) if full is a else (*sides[::-1], False)


def _known(full: Full, width: int) -> PartialDistribution:
    p_CV = np.exp(log_softmax(full.logits_CV))
    p_CM = np.pad(p_CV, ((0, 0), (0, width - p_CV.shape[1])))
    none = np.zeros(len(p_CM))
    return PartialDistribution(p_CM, p_CM, np.ones(p_CM.shape, bool), none, none, none)


def _placed(part: TopK, place_CK: Array, width: int) -> PartialDistribution:
    low_CK, high_CK = part.intervals
    lo_CM, hi_CM = np.zeros((2, len(low_CK), width))
    listed_CM = np.zeros(lo_CM.shape, bool)
    for target, values in ((lo_CM, low_CK), (hi_CM, high_CK), (listed_CM, True)):
        np.put_along_axis(target, place_CK, values, axis=1)
    tail_lo, tail_hi = part.tail
    return PartialDistribution(lo_CM, hi_CM, listed_CM, tail_lo, tail_hi, np.minimum(high_CK.min(axis=1), tail_hi))


def _scattered(part: TopK, width: int) -> PartialDistribution:
    side = _placed(part, part.ids_CK, width)
    # Every token has a column here, so the tail is at most the cap times the number of unlisted columns.
    tail_hi = np.minimum(side.tail_hi_C, (~side.listed_CM).sum(axis=1) * side.cap_C)
    return replace(side, tail_lo_C=np.minimum(side.tail_lo_C, tail_hi), tail_hi_C=tail_hi)


def _merged(a: TopK, b: TopK) -> tuple[PartialDistribution, PartialDistribution]:
    """Give both sides the same columns: first a's tokens, then b's. A token that both list uses a's column, and its
    column among b's is 0 on both sides."""
    width_a, width_b = a.ids_CK.shape[1], b.ids_CK.shape[1]
    place_CK = _places(a.ids_CK, b.ids_CK)
    own_CK = np.broadcast_to(np.arange(width_a), a.ids_CK.shape)
    sides = _placed(a, own_CK, width_a + width_b), _placed(b, place_CK, width_a + width_b)
    for side in sides:
        side.listed_CM[:, width_a:] |= place_CK < width_a
    return sides


def _places(ids_a: Array, ids_b: Array) -> Array:
    """Return a column for each of b's tokens, [C, K]: its index in a's list if it is there, otherwise a column after
    a's list."""
    count, width_a = ids_a.shape
    stride = int(max(ids_a.max(initial=0), ids_b.max(initial=0))) + 1
    rows_C1 = np.arange(count)[:, None] * stride
    order_CK = np.argsort(ids_a, axis=1)
    sorted_ids = (np.take_along_axis(ids_a, order_CK, axis=1) + rows_C1).reshape(-1)
    wanted = (ids_b + rows_C1).reshape(-1)
    found = np.minimum(np.searchsorted(sorted_ids, wanted), len(sorted_ids) - 1)
    is_there = sorted_ids[found] == wanted
    in_a = order_CK.reshape(-1)[found]
    own = np.broadcast_to(width_a + np.arange(ids_b.shape[1]), ids_b.shape).reshape(-1)
    return np.where(is_there, in_a, own).reshape(ids_b.shape)


def is_broken(side: Full | TopK) -> Array:
    if isinstance(side, Full):
        return np.asarray(np.isnan(log_softmax(side.logits_CV)).any(axis=1))
    is_nan_C = np.isnan(side.logprobs_CK).any(axis=1) | np.isnan(side.tail_C)
    return np.asarray(is_nan_C | np.all(np.isneginf(side.logprobs_CK), axis=1))


def argmax(side: Full | TopK) -> tuple[Array, Array]:
    """Return each row's most probable token id, [C], and whether another token may be just as probable, [C]."""
    if isinstance(side, Full):
        return side.logits_CV.argmax(axis=1), np.zeros(len(side.logits_CV), bool)
    best_CK = np.sort(side.logprobs_CK, axis=1)[:, ::-1]
    second = best_CK[:, 1] if best_CK.shape[1] > 1 else np.minimum(best_CK[:, 0], side.tail_C)
    top = np.take_along_axis(side.ids_CK, side.logprobs_CK.argmax(axis=1)[:, None], axis=1)[:, 0]
    return top, second >= best_CK[:, 0]


def entropy_bounds(side: Full | TopK, other: Full | TopK) -> tuple[Array, Array]:
    if isinstance(side, Full):
        exact = entropy(log_softmax(side.logits_CV))
        return exact, exact
    vocabulary = other.logits_CV.shape[1] if isinstance(other, Full) else _LARGEST_VOCABULARY
    others = max(vocabulary - side.ids_CK.shape[1], 1.0)
    low_CK, high_CK = side.intervals
    tail_lo, tail_hi = side.tail
    cap = np.minimum(high_CK.min(axis=1), tail_hi)
    least = np.minimum(_surprise(low_CK), _surprise(high_CK)).sum(axis=1)
    # -p ln p has its maximum at p = 1 / e.
    most = _surprise(np.clip(np.exp(-1.0), low_CK, high_CK)).sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        # t ln(n / t) has its maximum at t = n / e.
        mass = np.minimum(tail_hi, others / np.e)
        spread = np.where(mass > 0, mass * (np.log(others) - np.log(mass)), 0.0)
        packed = np.where(tail_lo > 0, -tail_lo * np.log(cap), 0.0)
    return least + packed, most + spread


def _surprise(p: Array) -> Array:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(p > 0, -p * np.log(p), 0.0)
