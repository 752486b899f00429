"""Compute the sums of each sequence that the figures need.

Shapes: T concatenated tokens of N sequences; C columns. The sums of a sequence depend only on
its own tokens, so they are bitwise the same in any batch.
"""

from __future__ import annotations

import numpy as np

from ...schemas.loss import Loss
from ..statistics.estimators import Array
from ..statistics.moments import centred, co_moment
from ..trace.ragged import Tokens
from .loss_terms import SIDES, Differences, terms_of

TOKEN_COLUMNS = (
    "num_tokens", "num_nan", "num_inf", "sum_d", "sum_abs_d", "sum_d2", "sum_drift", "sum_drift2", "mean_d", "mean_drift",
    "spread_d", "spread_drift", "spread_d_drift", "num_bad", "num_bad_mismatch", "advantage",
)  # fmt: skip
"""Over a sequence's tokens that count and have a finite logprob in every pass; num_nan and num_inf count the others.

d = train - rollout and drift = current - train, nats; spread: sums of squares and products around the means; num_bad: A < 0
and p(rollout) - p(current) >= 0.5, num_bad_mismatch: p(train) instead of p(current); advantage: the mean."""

SIGNED_COLUMNS = (
    "size", "used", "plain", "abs_plain", "applied", "abs_applied", "unclipped", "clipped", "to_clipped", "to_free",
)  # fmt: skip
"""Over terms by the sign of the advantage; sizes and biases are multiplied by the tokens per term.

size: |f(rho*)|; used: w f(rho_used), w the loss's correction; plain: f(rho_used) - f(rho*); applied: w f(rho_used) - f(rho*);
unclipped: A (w rho_used - rho*);
clipped: terms clipped under rho*; to_clipped: clipped under rho_used only; to_free: clipped under rho* only."""

COLUMNS = (*TOKEN_COLUMNS, *(f"{name}_{side}" for name in SIGNED_COLUMNS for side in SIDES), "terms_known")
"""Columns of a sequence's sums; terms_known is the number of terms with an advantage."""


def sequence_sums(loss: Loss, tokens: Tokens) -> np.ndarray:
    """Return the [C, N] sums named in COLUMNS."""
    found, parts = compared(tokens)
    found |= {
        "sum_d": parts.total(parts.d_T), "sum_abs_d": parts.total(np.abs(parts.d_T)),
        "sum_d2": parts.total(parts.d_T * parts.d_T), "sum_drift": parts.total(parts.drift_T),
        "sum_drift2": parts.total(parts.drift_T * parts.drift_T), "advantage": parts.advantage_N,
    }  # fmt: skip
    found |= _spreads(parts)
    found |= _bad(tokens, parts)
    found |= terms_of(loss, parts).sums(loss)
    return np.stack([found[name] for name in COLUMNS])


def _spreads(parts: Differences) -> dict[str, Array]:
    """Return the means of d and drift, and sums of squares and products around them."""
    d, drift = (centred(side_T, parts.starts_N, parts.num_N, parts.counts_T) for side_T in (parts.d_T, parts.drift_T))
    sums = {"mean_d": d.mean_N, "mean_drift": drift.mean_N}
    for name, one, other in (("d", d, d), ("drift", drift, drift), ("d_drift", d, drift)):
        sums[f"spread_{name}"] = co_moment(one, other, parts.starts_N, parts.num_N)
    return sums


def compared(tokens: Tokens) -> tuple[dict[str, Array], Differences]:
    """Return the log-ratios and counts of the tokens; log-ratios are 0 for tokens that do not count."""
    train_T, rollout_T, now_T = _passes(tokens)
    d_T, drift_T = train_T - rollout_T, now_T - train_T
    assert tokens.advantage_N is not None
    has_one, starts_N = tokens.advantage_T is None, tokens.starts_N
    own_T = np.repeat(tokens.advantage_N, tokens.lengths_N) if tokens.advantage_T is None else tokens.advantage_T
    fine_T = np.isfinite(d_T + drift_T)
    lengths_N, none_N = tokens.lengths_N.astype(np.float64), np.zeros(len(starts_N))
    counts = {"num_tokens": lengths_N, "num_nan": none_N, "num_inf": none_N}
    counts_T, known_T, known_N, advantage_T = None, None, lengths_N, own_T
    if tokens.counted_T is not None or not fine_T.all() or not np.isfinite(own_T).all():
        there_T = np.ones(len(d_T), bool) if tokens.counted_T is None else tokens.counted_T
        nan_T = there_T & (np.isnan(train_T) | np.isnan(rollout_T) | np.isnan(now_T))
        flags = {"num_tokens": there_T & fine_T, "num_nan": nan_T, "num_inf": there_T & ~fine_T & ~nan_T}
        counts = {name: np.add.reduceat(flag.astype(np.float64), starts_N) for name, flag in flags.items()}
        counts_T = flags["num_tokens"]
        known_T = counts_T & np.isfinite(own_T)
        known_N = np.add.reduceat(known_T.astype(np.float64), starts_N)
        d_T, drift_T = (np.where(counts_T, values, 0.0) for values in (d_T, drift_T))
        advantage_T = np.where(known_T, own_T, 0.0)
    mean_N = np.where(np.isfinite(tokens.advantage_N) & (known_N > 0), tokens.advantage_N, 0.0)
    if not has_one:
        mean_N = np.add.reduceat(advantage_T, starts_N) / np.maximum(known_N, 1)
    return counts, Differences(
        d_T=d_T, drift_T=drift_T, advantage_T=advantage_T, counts_T=counts_T, known_T=known_T,
        num_N=counts["num_tokens"], known_N=known_N, advantage_N=mean_N, has_one=has_one, starts_N=starts_N,
        lengths_N=tokens.lengths_N,
    )  # fmt: skip


def _bad(tokens: Tokens, parts: Differences) -> dict[str, Array]:
    """Return counts of bad updates (arXiv 2602.04879): tokens with a negative advantage although their probability
    already fell by at least 0.5."""
    train_T, rollout_T, now_T = _passes(tokens)
    likely = np.flatnonzero((rollout_T >= np.log(0.5)) & (parts.advantage_T < 0))
    counts = {}
    for name, side_T in (("num_bad", now_T), ("num_bad_mismatch", train_T)):
        bad = likely[np.exp(rollout_T[likely]) - np.exp(side_T[likely]) >= 0.5]
        rows = np.searchsorted(parts.starts_N, bad, "right") - 1
        counts[name] = np.bincount(rows, minlength=len(parts.starts_N)).astype(np.float64)
    return counts


def _passes(tokens: Tokens) -> tuple[Array, Array, Array]:
    """Return the logprobs of the trainer, the engine and the policy inside the loss; the trainer's replace those of a
    missing pass."""
    train_T = tokens.logprobs["train"]
    return train_T, tokens.logprobs.get("rollout", train_T), tokens.logprobs.get("now", train_T)
