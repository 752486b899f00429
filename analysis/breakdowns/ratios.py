"""The ratio that the samples call for, and the one that the loss uses.

Shapes: T tokens of N sequences, one after the other; K terms: tokens, or sequences where the loss takes one ratio of each.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...schemas.loss import TOKEN, Loss
from ..statistics.estimators import Array
from ..statistics.loss import log_ratios, log_used, log_weight


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioTerms:
    """Terms whose advantage is above or below 0."""

    before_K: Array
    """ln current / b, nats."""
    after_K: Array | None
    """ln of the ratio that multiplies the advantage in the loss; None where no loss is known."""
    positive_K: np.ndarray
    """bool: sign of the advantage."""
    row_K: np.ndarray
    """Number of the step."""


def terms_of(
    loss: Loss | None, a_T: Array, b_T: Array, now_T: Array | None, advantage_T: Array, there_T: np.ndarray,
    starts_N: np.ndarray, row_N: np.ndarray,
) -> RatioTerms:  # fmt: skip
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
