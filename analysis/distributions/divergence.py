"""Row-wise float64 divergences (nats) between two fully known distributions.

Shapes: C rows, V vocabulary.

Each divergence sums h(p, q) over tokens. h is 0 if p = q, never negative, jointly convex and homogeneous (degree 1):

KL(a || b)                 p ln(p / q) - p + q         sums to the usual KL, since p and q both add up to 1
total variation            |p - q| / 2
Jensen-Shannon             (p ln(2 p / (p + q)) + q ln(2 q / (p + q))) / 2, at most ln 2
                           Lin 1991, Divergence measures based on the Shannon entropy, eq. 3.1 with weights 1/2

This form of h loses no precision for nearby distributions, and bounds on h give bounds on the sum (see bounds.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Array = np.ndarray

DIVERGENCES = ("kl_ab", "kl_ba", "js", "tv")
_BOUNDED = (*DIVERGENCES, "entropy_a", "entropy_b")

MEASURES: dict[str, str] = {
    **dict.fromkeys((*DIVERGENCES, "max_abs_dlogit"), "DOUBLE"),
    "argmax_flip": "BOOLEAN",
    "num_unsupported_ab": "BIGINT",
    "num_unsupported_ba": "BIGINT",
    "entropy_a": "DOUBLE",
    "entropy_b": "DOUBLE",
    "vocab_a": "BIGINT",
    "vocab_b": "BIGINT",
    "mass_beyond_a": "DOUBLE",
    "mass_beyond_b": "DOUBLE",
    **{f"{name}_{end}": "DOUBLE" for name in _BOUNDED for end in ("low", "high")},
}


@dataclass(frozen=True, slots=True)
class Full:
    logits_CV: Array
    """float64 logits after temperature, up to a constant per row. -inf for tokens with probability 0."""


def log_softmax(logits_CV: Array) -> Array:
    """Return [C, V] logprobs, three times faster than scipy. A row with NaN, +inf or only -inf gives NaN."""
    with np.errstate(invalid="ignore", divide="ignore"):
        shifted_CV = logits_CV - logits_CV.max(axis=1, keepdims=True)
        return np.asarray(shifted_CV - np.log(np.exp(shifted_CV).sum(axis=1, keepdims=True)))


def kl_terms(logp: Array, logq: Array) -> Array:
    """Return h = p ln(p / q) - p + q, or +inf where only q is 0. scipy's kl_div is imprecise where p is close to q."""
    with np.errstate(invalid="ignore", over="ignore"):
        d, p, q = logp - logq, np.exp(logp), np.exp(logq)
        # For small d, p ln(p / q) and q - p nearly cancel, so compute their sum (about p d^2 / 2) with expm1.
        terms = np.where(np.abs(d) < 0.1, p * (d + np.expm1(-np.clip(d, -1, 1))), p * d - p + q)
    terms = np.where(np.isneginf(logp), q, terms)
    terms = np.where(np.isneginf(logq) & ~np.isneginf(logp), np.inf, terms)
    return np.where(np.isnan(logp) | np.isnan(logq), np.nan, np.maximum(terms, 0.0))


def js_terms(logp: Array, logq: Array) -> Array:
    with np.errstate(invalid="ignore"):
        # h = (p + q) / 4 * ((1 + r) ln(1 + r) + (1 - r) ln(1 - r)) with r = (p - q) / (p + q).
        r = np.tanh((logp - logq) / 2)
        r = np.where(np.isneginf(logp) & np.isneginf(logq), 0.0, r)
    return np.asarray((np.exp(logp) + np.exp(logq)) / 4 * even_entropy(r))


def tv_terms(logp: Array, logq: Array) -> Array:
    return np.asarray(np.abs(np.exp(logp) - np.exp(logq)) / 2)


def entropy(logp: Array) -> Array:
    from scipy.special import entr

    return np.asarray(entr(np.exp(logp)).sum(axis=1))


def even_entropy(r: Array) -> Array:
    from scipy.special import xlog1py

    return np.asarray(np.maximum(xlog1py(1 + r, r) + xlog1py(1 - r, -r), 0.0))


def compare_full(a: Full, b: Full) -> dict[str, Array]:
    """Return all MEASURES, by name, for rows whose full vocabulary is known on both sides.

    If one vocabulary is padded, both distributions are renormalized over the common tokens before they are compared.
    Separate columns report each side's mass outside these tokens.
    """
    vocab_a, vocab_b = a.logits_CV.shape[1], b.logits_CV.shape[1]
    whole_a, whole_b = log_softmax(a.logits_CV), log_softmax(b.logits_CV)
    common = min(vocab_a, vocab_b)
    logp = whole_a if vocab_a == common else log_softmax(a.logits_CV[:, :common])
    logq = whole_b if vocab_b == common else log_softmax(b.logits_CV[:, :common])
    broken = np.isnan(whole_a).any(axis=1) | np.isnan(whole_b).any(axis=1)
    has_a, has_b = ~np.isneginf(logp), ~np.isneginf(logq)
    measures = {
        "kl_ab": kl_terms(logp, logq).sum(axis=1),
        "kl_ba": kl_terms(logq, logp).sum(axis=1),
        "js": np.minimum(js_terms(logp, logq).sum(axis=1), np.log(2.0)),
        "tv": np.minimum(tv_terms(logp, logq).sum(axis=1), 1.0),
        "max_abs_dlogit": _max_abs_dlogit(logp, logq, has_a & has_b),
        "argmax_flip": unknown(whole_a.argmax(axis=1) != whole_b.argmax(axis=1), broken),
        "num_unsupported_ab": unknown((has_a & ~has_b).sum(axis=1), broken),
        "num_unsupported_ba": unknown((has_b & ~has_a).sum(axis=1), broken),
        "entropy_a": entropy(whole_a),
        "entropy_b": entropy(whole_b),
        "mass_beyond_a": np.exp(whole_a[:, common:]).sum(axis=1),
        "mass_beyond_b": np.exp(whole_b[:, common:]).sum(axis=1),
    }
    for name in _BOUNDED:
        measures[f"{name}_low"] = measures[f"{name}_high"] = measures[name]
    rows = len(logp)
    return measures | {"vocab_a": np.full(rows, vocab_a), "vocab_b": np.full(rows, vocab_b)}


def _max_abs_dlogit(logp: Array, logq: Array, both: Array) -> Array:
    """Return each row's largest |logit difference - mean difference|, over the tokens with mass on both sides."""
    with np.errstate(invalid="ignore"):
        d = np.where(both, logp - logq, 0.0)
        count = both.sum(axis=1, keepdims=True)
        centred = np.where(both, d - d.sum(axis=1, keepdims=True) / np.maximum(count, 1), 0.0)
        return np.where(count[:, 0] > 0, np.abs(centred).max(axis=1), np.nan)


def unknown(values: Array, where: Array) -> np.ma.MaskedArray:

    return np.ma.masked_array(values, mask=where)  # type: ignore[no-untyped-call]
