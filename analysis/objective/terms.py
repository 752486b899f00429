"""What a ratio and an advantage add to the objective, and where the loss clips them.

Every function takes arrays of one shape: of tokens, or of sequences where the loss takes one ratio of a whole sequence.
"""

from __future__ import annotations

import numpy as np

from ...schemas.loss import CISPO, REINFORCE, Loss
from ..totals import Array

SAFETY_BOUND = 20.0
"""Log-ratios are clamped to +-20 nats before their exp is taken, as frameworks do."""


def clamped_exp(log_ratio: Array) -> Array:
    """exp of log-ratios, which are clamped to +-20 nats.

    >>> clamped_exp(np.array([0.0, -1e9])).tolist()
    [1.0, 2.061153622438558e-09]
    """
    return np.exp(np.clip(log_ratio, -SAFETY_BOUND, SAFETY_BOUND))


def contribution(loss: Loss, ratio: Array, advantage: Array) -> Array:
    """f_A(ratio), what a term adds to the objective, in the unit of the advantage.

    ppo_clip: min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A), with the ratio at most `clip_hard`; reinforce:
    ratio A; cispo: min(ratio, clip_high) A, the weight on grad log p.

    >>> contribution(Loss(), np.array([1.5, 0.5, 1.5]), np.array([1.0, 1.0, -1.0])).tolist()
    [1.2, 0.5, -1.5]
    """
    if loss.kind == REINFORCE:
        return ratio * advantage
    if loss.kind == CISPO:
        return np.asarray(np.minimum(ratio, loss.clip_high) * advantage)
    bounded = np.clip(ratio, 1 - loss.clip_low, 1 + loss.clip_high)
    free = ratio if loss.clip_hard is None else np.minimum(ratio, loss.clip_hard)
    return np.asarray(np.minimum(free * advantage, bounded * advantage))


def is_clipped(loss: Loss, ratio: Array, advantage: Array) -> np.ndarray:
    """bool: whether the ratio is beyond the bound that holds for the sign of its advantage.

    Under ppo_clip such a term gives no gradient, under cispo its weight is the bound.

    >>> is_clipped(Loss(), np.array([1.5, 0.5, 1.5, 0.5]), np.array([1.0, 1.0, -1.0, -1.0])).tolist()
    [True, False, False, True]
    """
    if loss.kind == REINFORCE:
        return np.zeros(np.shape(ratio), bool)
    if loss.kind == CISPO:
        return np.asarray((ratio > loss.clip_high) & (advantage != 0))
    hard = np.inf if loss.clip_hard is None else loss.clip_hard
    above = (ratio > min(1 + loss.clip_high, hard)) & (advantage > 0)
    below = ((ratio < 1 - loss.clip_low) | (ratio > hard)) & (advantage < 0)
    return np.asarray(above | below)


def correction_weight(loss: Loss, log_ratio: Array) -> Array:
    """The weight that the loss's correction gives r = exp(log_ratio), log_ratio = train - rollout in nats.

    Truncated ratios become the bound, masked ones 0; a bound that is None does not bind.

    >>> correction_weight(Loss(correction="token_mask", correction_high=3.0), np.log([2.0, 4.0])).round(6).tolist()
    [2.0, 0.0]
    """
    ratio = clamped_exp(log_ratio)
    low = 0.0 if loss.correction_low is None else loss.correction_low
    high = np.inf if loss.correction_high is None else loss.correction_high
    if loss.correction.endswith("truncate"):
        return np.asarray(np.clip(ratio, low, high))
    return np.asarray(np.where((ratio < low) | (ratio > high), 0.0, ratio))
