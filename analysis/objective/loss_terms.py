"""Loss terms and their sums per sequence. A term is a token or sequence with its own ratio.

Shapes: T tokens, N sequences, K terms (T or N).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...schemas.loss import TOKEN, VESPO, VESPO_LOG_RATIO, Loss
from ..statistics.estimators import Array
from ..statistics.loss import clamped_exp, contribution, correction_weight, is_clipped, log_ratios, log_used

SIDES = ("positive", "negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    """Log-ratios and advantages per token. Log-ratios are 0 for tokens that are masked or lack a finite logprob."""

    d_T: Array
    """Logprob in train minus logprob in rollout (nats)."""
    drift_T: Array
    """Logprob in current minus logprob in train (nats)."""
    advantage_T: Array
    counts_T: np.ndarray | None
    """True for unmasked tokens with a finite logprob in every pass. None if this holds for all tokens."""
    known_T: np.ndarray | None
    """True for tokens in `counts_T` that have an advantage. None if all tokens have one."""
    num_N: Array
    known_N: Array
    advantage_N: Array
    has_one: bool
    starts_N: np.ndarray
    lengths_N: np.ndarray

    def total(self, values_T: Array) -> Array:
        return np.add.reduceat(values_T, self.starts_N)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerms:
    ratio_true: Array
    ratio_used: Array
    ratio_applied: Array
    """For vespo, `ratio_used` multiplied by the correction weight. For other losses, `ratio_used`."""
    weight: Array | float
    """Correction weight. For vespo, it is 1, because `ratio_applied` already includes the weight."""
    advantage: Array
    tokens: Array | float
    sign_N: Array | None
    """Sign of each sequence's advantage, or None if advantages vary within a sequence."""
    known_N: Array
    starts_N: np.ndarray

    def sums(self, loss: Loss) -> dict[str, Array]:
        true, used = (contribution(loss, ratio, self.advantage) for ratio in (self.ratio_true, self.ratio_used))
        plain = (used - true) * self.tokens
        found = self._signed("size", np.abs(true) * self.tokens) | self._signed("plain", plain)
        found |= self._signed("abs_plain", np.abs(plain)) | {"terms_known": self.known_N}
        if loss.correction == "none":
            found |= {f"{name}applied_{side}": found[f"{name}plain_{side}"] for name in ("", "abs_") for side in SIDES}
        else:
            used = self._corrected(loss, used)
            applied = (used - true) * self.tokens
            found |= self._signed("applied", applied) | self._signed("abs_applied", np.abs(applied))
        found |= self._signed("unclipped", self._unclipped() * self.tokens)
        return found | self._signed("used", used * self.tokens) | self._clips(loss)

    def _unclipped(self) -> Array:
        return np.asarray(self.advantage * (self.weight * self.ratio_used - self.ratio_true))

    def _corrected(self, loss: Loss, used: Array) -> Array:
        if self.ratio_applied is not self.ratio_used:
            used = contribution(loss, self.ratio_applied, self.advantage)
        return np.asarray(self.weight * used)

    def _clips(self, loss: Loss) -> dict[str, Array]:
        true, used = (is_clipped(loss, ratio, self.advantage) for ratio in (self.ratio_true, self.ratio_used))
        counts = self._count("clipped", true) | self._count("to_clipped", used & ~true)
        return counts | self._count("to_free", true & ~used)

    def _total(self, values_K: Array) -> Array:
        return np.add.reduceat(values_K, self.starts_N)

    def _signed(self, name: str, values_K: Array) -> dict[str, Array]:
        if self.sign_N is None:
            sides = [np.where(self.advantage > 0, values_K, 0.0), np.where(self.advantage < 0, values_K, 0.0)]
            positive, negative = (self._total(side) for side in sides)
        else:
            total_N = self._total(values_K)
            positive, negative = np.where(self.sign_N > 0, total_N, 0.0), np.where(self.sign_N < 0, total_N, 0.0)
        return {f"{name}_positive": positive, f"{name}_negative": negative}

    def _count(self, name: str, flags_K: np.ndarray) -> dict[str, Array]:
        flagged = np.flatnonzero(flags_K)
        row = np.searchsorted(self.starts_N, flagged, "right") - 1
        above = self.advantage[flagged] > 0
        return {
            f"{name}_{side}": np.bincount(row[chosen], minlength=len(self.starts_N)).astype(np.float64)
            for side, chosen in zip(SIDES, (above, ~above), strict=True)
        }


def terms_of(loss: Loss, tokens: Differences) -> LossTerms:
    if loss.kind == VESPO:
        return _of_products(loss, tokens)
    d, drift = (log_ratios(loss, log_T, tokens.starts_N, tokens.num_N) for log_T in (tokens.d_T, tokens.drift_T))
    true, used = _ratios(loss, d + drift, drift)
    weight = _weight(loss, tokens)
    if loss.level != TOKEN:
        return _one_each(tokens, true, used, used, weight)
    return LossTerms(
        ratio_true=true, ratio_used=used, ratio_applied=used, weight=weight,
        advantage=tokens.advantage_T, tokens=1.0, sign_N=np.sign(tokens.advantage_N) if tokens.has_one else None,
        known_N=tokens.known_N, starts_N=tokens.starts_N,
    )  # fmt: skip


def _weight(loss: Loss, tokens: Differences) -> Array | float:
    """Return each term's correction weight, [K]. A sequence's weight is the mean of its tokens' weights if the
    correction is per token."""
    if loss.correction == "none":
        return 1.0
    if not loss.correction.startswith("token"):
        weight_N = correction_weight(loss, tokens.total(tokens.d_T))
        return np.repeat(weight_N, tokens.lengths_N) if loss.level == TOKEN else weight_N
    weight_T = correction_weight(loss, tokens.d_T)
    if loss.level == TOKEN:
        return weight_T
    known_T = weight_T if tokens.known_T is None else weight_T * tokens.known_T
    return np.asarray(tokens.total(known_T) / np.maximum(tokens.known_N, 1))


def _of_products(loss: Loss, tokens: Differences) -> LossTerms:
    """Return the terms of the vespo loss. Their ratios and weights are products over a sequence's tokens, and the logs
    of these products are clamped to +-20 nats."""
    term_d_N = tokens.total(tokens.d_T)
    true_N, drift_N = (
        log_ratios(loss, log_T, tokens.starts_N, tokens.num_N)
        for log_T in (tokens.d_T + tokens.drift_T, tokens.drift_T)
    )
    true, used = _ratios(loss, true_N, drift_N)
    applied = used
    if loss.correction != "none":
        is_token = loss.correction.startswith("token")
        log_weight = np.clip(np.log(correction_weight(loss, tokens.d_T if is_token else term_d_N)), *VESPO_LOG_RATIO)
        if is_token:
            log_weight = tokens.total(log_weight if tokens.counts_T is None else log_weight * tokens.counts_T)
        applied = clamped_exp(log_used(loss, true_N, drift_N) + log_weight)
    return _one_each(tokens, true, used, applied, 1.0)


def _one_each(tokens: Differences, true: Array, used: Array, applied: Array, weight: Array | float) -> LossTerms:
    has_N = tokens.known_N > 0
    return LossTerms(
        ratio_true=true, ratio_used=used, ratio_applied=applied, weight=weight, advantage=tokens.advantage_N,
        tokens=tokens.known_N, sign_N=np.sign(tokens.advantage_N), known_N=has_N.astype(np.float64),
        starts_N=np.arange(len(has_N)),
    )  # fmt: skip


def _ratios(loss: Loss, log_true: Array, drift: Array) -> tuple[Array, Array]:
    true = clamped_exp(log_true)
    used = log_used(loss, log_true, drift)
    return true, true if used is log_true else clamped_exp(used)
