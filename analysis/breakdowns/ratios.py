"""The ratio that the samples call for, and the one that the loss uses.

Shapes: T tokens of N sequences, one after the other; K terms: tokens, or sequences where the loss takes one ratio of each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ...schemas.loss import CISPO, CURRENT, ROLLOUT, SAPO, SEQUENCE_MEAN, TOKEN, VESPO, Loss
from ..objective.terms import SAFETY_BOUND, clamped_exp, gate, log_gamma
from ..statistics.estimators import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Terms whose advantage is above or below 0."""

    before_K: Array
    """ln current / b, nats."""
    after_K: Array | None
    """ln of the ratio that multiplies the advantage in the loss; None where no loss is known."""
    positive_K: np.ndarray
    """bool: sign of the advantage."""
    row_K: np.ndarray
    """Number of the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Of ln ratio; infinite where nothing binds."""

    low: float
    high: float
    hard: float
    """Largest unclipped one, whatever the sign of the advantage."""


def bounds_of(loss: Loss) -> Bounds:
    """Where the loss cuts a ratio.

    >>> bounds_of(Loss(kind="cispo", clip_high=1.0))
    Bounds(low=-inf, high=0.0, hard=inf)
    """
    if not loss.has_clip:
        return Bounds(low=-math.inf, high=math.inf, hard=math.inf)
    if loss.kind == CISPO:
        return Bounds(low=-math.inf, high=_log(loss.clip_high), hard=math.inf)
    hard = math.inf if loss.clip_hard is None else _log(loss.clip_hard)
    return Bounds(low=_log(1 - loss.clip_low), high=_log(1 + loss.clip_high), hard=hard)


def cut(loss: Loss, log_ratio: Array, positive: np.ndarray) -> Array:
    """ln of f_A(ratio) / A, f the loss's (see objective.terms.contribution): what multiplies the advantage after the clip.

    ppo_clip takes min(ratio A, clip(ratio) A), so that a positive advantage is cut above and a negative one below; cispo
    cuts both above; sapo and vespo have a smooth weight instead.

    >>> np.exp(cut(Loss(), np.log([1.5, 0.5, 1.5, 0.5]), np.array([True, True, False, False]))).round(6).tolist()
    [1.2, 0.5, 1.5, 0.8]
    """
    if loss.kind == SAPO:
        return np.log(gate(loss, clamped_exp(log_ratio), positive))
    if loss.kind == VESPO:
        return log_gamma(loss, clamped_exp(log_ratio), positive)
    bounds = bounds_of(loss)
    free = np.minimum(log_ratio, bounds.hard)
    bounded = np.minimum(np.maximum(log_ratio, bounds.low), bounds.high)
    if loss.kind == CISPO:
        return np.asarray(bounded)
    return np.where(positive, np.minimum(free, bounded), np.maximum(free, bounded))


def terms_of(
    loss: Loss | None, a_T: Array, b_T: Array, now_T: Array | None, advantage_T: Array, there_T: np.ndarray,
    starts_N: np.ndarray, row_N: np.ndarray,
) -> Terms:  # fmt: skip
    """The terms of a block: pass a stands for `train`, b for `rollout`, and a for `current` where `now` is None.

    Without a loss the ratios are of tokens. A sequence's ratio is over its compared tokens and goes with the mean of their
    advantages.
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
        num_N = np.maximum(_total(there_T, starts_N), 1) if loss.level == SEQUENCE_MEAN else 1.0
        advantage_N = _total(np.where(known_T, advantage_T, 0.0), starts_N)
        kept_N = advantage_N != 0
        if loss.kind == VESPO:
            before_T, moved_T = (np.clip(values, -SAFETY_BOUND, SAFETY_BOUND) for values in (before_T, moved_T))
        before_K, moved_K = (
            (_total(np.where(there_T, values, 0.0), starts_N) / num_N)[kept_N] for values in (before_T, moved_T)
        )
        positive_K, row_K = advantage_N[kept_N] > 0, row_N[kept_N]
    after_K = None if loss is None else cut(loss, _used(loss, before_K, moved_K), positive_K)
    return Terms(before_K=before_K, after_K=after_K, positive_K=positive_K, row_K=row_K)


def _used(loss: Loss, before_K: Array, moved_K: Array) -> Array:
    """ln current / denominator."""
    if loss.denominator == ROLLOUT:
        return before_K
    return np.zeros_like(moved_K) if loss.denominator == CURRENT else moved_K


def _total(values_T: np.ndarray, starts_N: np.ndarray) -> Array:
    return np.asarray(np.add.reduceat(values_T.astype(np.float64), starts_N))


def _log(ratio: float) -> float:
    return math.log(ratio) if ratio > 0 else -math.inf
