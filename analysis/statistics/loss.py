"""Policy loss terms: contributions to the objective, clipping and corrections.

sql/loss.sql implements the same rules as SQL macros, and replay/gradients implements them in torch.

Shapes: T tokens in N sequences, concatenated, and K terms (tokens, or sequences with a single ratio). If a function
states no shapes, its arrays have equal shapes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ...schemas.loss import CISPO, PPO, SAPO, SEQUENCE_MEAN, TOKEN, VESPO, VESPO_LEAST_LAMBDA, VESPO_LOG_RATIO, Loss
from ...schemas.passes import CURRENT, ROLLOUT
from .estimators import Array

SAFETY_BOUND = 20.0
"""Log-ratios are clamped to +-20 nats before exp, as in the frameworks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Ratio bounds for positive and negative advantages. The default is unbounded."""

    positive_high: float = math.inf
    negative_low: float = -math.inf
    negative_high: float = math.inf

    def cut(self, ratio: Array, positive: np.ndarray) -> Array:
        at_most = np.minimum(ratio, self.positive_high)
        if (self.negative_low, self.negative_high) == (-math.inf, self.positive_high):  # same bounds for both signs
            return at_most
        return np.where(positive, at_most, np.clip(ratio, self.negative_low, self.negative_high))


def bounds_of(loss: Loss) -> Bounds:
    """Return a loss's bounds: on the weight for cispo, on the ratio for ppo_clip.

    ppo_clip is min(min(ratio, hard) A, clip(ratio) A).

    >>> bounds_of(Loss(clip_low=0.5, clip_high=0.5, clip_hard=2.0))
    Bounds(positive_high=1.5, negative_low=0.5, negative_high=2.0)
    """
    if loss.kind == CISPO:
        return Bounds(positive_high=loss.clip_high, negative_high=loss.clip_high)
    if loss.kind == PPO:
        high, hard = 1 + loss.clip_high, math.inf if loss.clip_hard is None else loss.clip_hard
        return Bounds(positive_high=min(high, hard), negative_low=1 - loss.clip_low, negative_high=max(high, hard))
    return Bounds()


def log_ratios(loss: Loss, log_ratio_T: Array, starts_N: np.ndarray, num_N: Array) -> Array:
    """Convert the log-ratios of tokens [T] to those of terms [K]. The log-ratios of masked tokens must be 0.

    `num_N` counts each sequence's unmasked tokens.

    >>> starts, num = np.array([0, 2]), np.array([2.0, 1.0])
    >>> log_ratios(Loss(level="sequence_mean"), np.array([1.0, 3.0, 5.0]), starts, num).tolist()
    [2.0, 5.0]
    """
    if loss.level == TOKEN:
        return log_ratio_T
    if loss.kind == VESPO:
        log_ratio_T = np.clip(log_ratio_T, -SAFETY_BOUND, SAFETY_BOUND)
    total_N = np.add.reduceat(log_ratio_T, starts_N)
    return np.asarray(total_N / np.maximum(num_N, 1)) if loss.level == SEQUENCE_MEAN else np.asarray(total_N)


def log_used(loss: Loss, log_true: Array, log_drift: Array) -> Array:
    if loss.denominator == ROLLOUT:
        return log_true
    return np.zeros_like(log_drift) if loss.denominator == CURRENT else log_drift


def clamped_exp(log_ratio: Array) -> Array:
    """Return exp(log_ratio), where log_ratio is first clamped to +-20 nats.

    >>> clamped_exp(np.array([0.0, -1e9])).tolist()
    [1.0, 2.061153622438558e-09]
    """
    return np.exp(np.clip(log_ratio, -SAFETY_BOUND, SAFETY_BOUND))


def contribution(loss: Loss, ratio: Array, advantage: Array) -> Array:
    """Return f_A(ratio), the contribution of a term to the objective.

        ppo_clip   min(min(ratio, clip_hard) A, clip(ratio, 1 - clip_low, 1 + clip_high) A)
        reinforce  ratio A
        sapo       4 / tau sigmoid(tau (ratio - 1)) A
        cispo      min(ratio, clip_high) A, the weight on grad log p
        vespo      phi(ratio) A, the weight on grad log p

    >>> contribution(Loss(), np.array([1.5, 0.5, 1.5]), np.array([1.0, 1.0, -1.0])).tolist()
    [1.2, 0.5, -1.5]
    >>> contribution(Loss(kind="sapo"), np.array([1.0]), np.array([1.0])).tolist()
    [2.0]
    """
    if loss.kind == SAPO:
        return sapo_gate(loss, ratio, advantage > 0) * advantage
    if loss.kind == VESPO:
        return np.exp(vespo_log_weight(loss, ratio, advantage >= 0)) * advantage
    return bounds_of(loss).cut(ratio, advantage > 0) * advantage


def sapo_gate(loss: Loss, ratio: Array, positive: np.ndarray) -> Array:
    """Return SAPO's gate, 4 / tau sigmoid(tau (ratio - 1)), where tau depends on A's sign (arXiv 2511.20347).

    >>> sapo_gate(Loss(kind="sapo"), np.array([1.0, 3.0]), np.array([True, True])).round(6).tolist()
    [2.0, 3.523188]
    """
    tau = np.where(positive, loss.sapo_temperature_pos, loss.sapo_temperature_neg)
    return np.asarray(4 / tau / (1 + np.exp(-tau * (ratio - 1))))


def vespo_log_weight(loss: Loss, ratio: Array, positive: np.ndarray) -> Array:
    """Return ln phi(ratio) for VESPO, where phi = exp(lambda + k ln ratio - lambda ratio) (arXiv 2602.10693).

    k and lambda depend on whether A >= 0. The ratio is clamped to [1e-8, exp(20)].

    >>> vespo_log_weight(Loss(kind="vespo", level="sequence_sum"), np.array([1.0, 2.0]), np.array([True, True])).round(6).tolist()
    [0.0, -1.613706]
    """
    with np.errstate(divide="ignore"):
        log_ratio = np.clip(np.log(ratio), *VESPO_LOG_RATIO)
    k = np.where(positive, loss.vespo_k_pos, loss.vespo_k_neg)
    decay = np.maximum(np.where(positive, loss.vespo_lambda_pos, loss.vespo_lambda_neg), VESPO_LEAST_LAMBDA)
    return np.asarray(decay + k * log_ratio - decay * np.exp(log_ratio))


def is_clipped(loss: Loss, ratio: Array, advantage: Array) -> np.ndarray:
    """Return True where a ratio is outside the bounds for its advantage's sign. An advantage of 0 has no bounds.

    >>> is_clipped(Loss(), np.array([1.5, 0.5, 1.5, 0.5]), np.array([1.0, 1.0, -1.0, -1.0])).tolist()
    [True, False, False, True]
    """
    if not loss.has_clip:
        return np.zeros(np.shape(ratio), bool)
    bounds = bounds_of(loss)
    below, above = ratio < bounds.negative_low, ratio > bounds.negative_high
    return np.asarray(((advantage > 0) & (ratio > bounds.positive_high)) | ((advantage < 0) & (below | above)))


def correction_weight(loss: Loss, log_ratio: Array) -> Array:
    """Return the loss's correction weight for a ratio exp(log_ratio), where log_ratio = train - rollout (nats).

    If the ratio is beyond a bound, the weight is this bound if the loss truncates ratios, and 0 if it masks them.

    >>> correction_weight(Loss(correction="token_mask", correction_high=3.0), np.log([2.0, 4.0])).round(6).tolist()
    [2.0, 0.0]
    """
    ratio = clamped_exp(log_ratio)
    low = 0.0 if loss.correction_low is None else loss.correction_low
    high = np.inf if loss.correction_high is None else loss.correction_high
    if loss.correction.endswith("truncate"):
        return np.asarray(np.clip(ratio, low, high))
    return np.asarray(np.where((ratio < low) | (ratio > high), 0.0, ratio))


_OPTIONS = {
    PPO: ("clip_low", "clip_high", "clip_hard"),
    CISPO: ("clip_high",),
    SAPO: ("sapo_temperature_pos", "sapo_temperature_neg"),
    VESPO: ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
}


def sql_options(loss: Loss) -> str:
    """Write a loss as options for the macros in sql/loss.sql. Its numbers are preserved bit for bit.

    >>> sql_options(Loss(kind="cispo", clip_high=1.2))
    "kind := 'cispo', clip_high := '1.2'::DOUBLE"
    """
    known = {name: getattr(loss, name) for name in _OPTIONS.get(loss.kind, ())}
    numbers = [f"{name} := '{float(value)!r}'::DOUBLE" for name, value in known.items() if value is not None]
    return ", ".join([f"kind := '{loss.kind}'", *numbers])
