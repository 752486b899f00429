"""What a ratio and an advantage add to the objective, and where the loss clips them.

Every function takes arrays of one shape: of tokens, or of sequences where the loss takes one ratio of a whole sequence.
"""

from __future__ import annotations

import numpy as np

from ...schemas.loss import CISPO, REINFORCE, SAPO, VESPO, VESPO_LEAST_LAMBDA, VESPO_LOG_RATIO, Loss
from ..statistics.estimators import Array

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
    ratio A; sapo: 4 / tau sigmoid(tau (ratio - 1)) A. Of cispo, min(ratio, clip_high) A, and of vespo, phi(ratio) A, it is
    the weight on grad log p.

    >>> contribution(Loss(), np.array([1.5, 0.5, 1.5]), np.array([1.0, 1.0, -1.0])).tolist()
    [1.2, 0.5, -1.5]
    >>> contribution(Loss(kind="sapo"), np.array([1.0]), np.array([1.0])).tolist()
    [2.0]
    """
    if loss.kind == REINFORCE:
        return ratio * advantage
    if loss.kind == CISPO:
        return np.asarray(np.minimum(ratio, loss.clip_high) * advantage)
    if loss.kind == SAPO:
        return gate(loss, ratio, advantage > 0) * advantage
    if loss.kind == VESPO:
        return np.exp(log_gamma(loss, ratio, advantage >= 0)) * advantage
    bounded = np.clip(ratio, 1 - loss.clip_low, 1 + loss.clip_high)
    free = ratio if loss.clip_hard is None else np.minimum(ratio, loss.clip_hard)
    return np.asarray(np.minimum(free * advantage, bounded * advantage))


def gate(loss: Loss, ratio: Array, positive: np.ndarray) -> Array:
    """Sapo's 4 / tau sigmoid(tau (ratio - 1)), tau by whether A > 0. arXiv 2511.20347.

    >>> gate(Loss(kind="sapo"), np.array([1.0, 3.0]), np.array([True, True])).round(6).tolist()
    [2.0, 3.523188]
    """
    tau = np.where(positive, loss.sapo_temperature_pos, loss.sapo_temperature_neg)
    return np.asarray(4 / tau / (1 + np.exp(-tau * (ratio - 1))))


def log_gamma(loss: Loss, ratio: Array, positive: np.ndarray) -> Array:
    """ln of vespo's phi(ratio) = exp(lambda + k ln ratio - lambda ratio), k and lambda by whether A >= 0. arXiv 2602.10693.

    The ratio is clamped to [1e-8, exp(20)].

    >>> log_gamma(Loss(kind="vespo", level="sequence_sum"), np.array([1.0, 2.0]), np.array([True, True])).round(6).tolist()
    [0.0, -1.613706]
    """
    with np.errstate(divide="ignore"):
        log_ratio = np.clip(np.log(ratio), *VESPO_LOG_RATIO)
    k = np.where(positive, loss.vespo_k_pos, loss.vespo_k_neg)
    decay = np.maximum(np.where(positive, loss.vespo_lambda_pos, loss.vespo_lambda_neg), VESPO_LEAST_LAMBDA)
    return np.asarray(decay + k * log_ratio - decay * np.exp(log_ratio))


def is_clipped(loss: Loss, ratio: Array, advantage: Array) -> np.ndarray:
    """bool: whether the ratio is beyond the bound that holds for the sign of its advantage. The one rule of what is clipped.

    Under ppo_clip such a term gives no gradient, under cispo one whose weight is the bound; other losses have no bound, and
    without an advantage other than 0 nothing is clipped. `loss_clips` is the same in SQL.

    >>> is_clipped(Loss(), np.array([1.5, 0.5, 1.5, 0.5]), np.array([1.0, 1.0, -1.0, -1.0])).tolist()
    [True, False, False, True]
    """
    if not loss.has_clip:
        return np.zeros(np.shape(ratio), bool)
    if loss.kind == CISPO:
        return np.asarray((ratio > loss.clip_high) & (advantage != 0))
    hard = np.inf if loss.clip_hard is None else loss.clip_hard
    above = (ratio > min(1 + loss.clip_high, hard)) & (advantage > 0)
    # max(min(ratio, hard), clip(ratio)): the plain bound holds a negative advantage up to its own end.
    below = ((ratio < 1 - loss.clip_low) | (ratio > max(1 + loss.clip_high, hard))) & (advantage < 0)
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
