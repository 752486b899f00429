"""Detect values that are not logprobs of the sampled tokens: values above 0, unrelated values, or another quantity."""

from __future__ import annotations

import numpy as np

from .. import commands
from ..finding import Finding
from ..pair_data import PairData
from ..sample import PassSample
from ..thresholds import MAX_CUT_NATS, MAX_LOGPROB, MIN_CORRELATION, MIN_LOGPROBS, MIN_OFF_NATS, MIN_SPREAD
from .grid import row_spreads


def find_positive(data: PairData) -> list[tuple[Finding, np.ndarray]]:
    """Return a finding for each pass with values above 0, with a mask of the tokens that have such values, [N] bool."""
    found = []
    for side in (data.sample.a, data.sample.b):
        where = data.keep & (np.nan_to_num(side.logprobs, nan=-1.0) > MAX_LOGPROB)
        if where.any():
            found.append((_positive(data, side, where), where))
    return found


def _positive(data: PairData, side: PassSample, where: np.ndarray) -> Finding:
    values = side.logprobs[where]
    return Finding(
        code="not_logprobs",
        signal="above_zero",
        effect=float(np.sqrt(np.mean(data.sample.d[where] ** 2))),
        share=float(where.sum() / max(data.sample.compared.sum(), 1)),
        next=commands.sql(
            data,
            "SELECT step, seq_id, position, token_id, logprob_a, logprob_b FROM {pair} WHERE mask AND "
            f"logprob_{'a' if side is data.sample.a else 'b'} > {MAX_LOGPROB} LIMIT 20",
        ),
        numbers={
            "side": side.name,
            "num_tokens": int(where.sum()),
            "least": float(values.min()),
            "largest": float(values.max()),
        },
    )


def find_constant_rows(data: PairData) -> list[Finding]:
    """Detect a pass with the same value, such as the mean, at all tokens in a sequence, while the other pass varies."""
    for side, values, others in (("a", data.a, data.b), ("b", data.b, data.a)):
        spread, spread_other = row_spreads(data, values), row_spreads(data, others)
        asked = np.isfinite(spread) & (spread_other > MIN_OFF_NATS)
        if asked.sum() >= 3 and np.all(spread[asked] < MIN_SPREAD) and np.std(values) > MIN_SPREAD:
            return [_of_something_else(data, "placeholders", "constant_rows", side)]
    return []


def find_other_quantity(data: PairData) -> list[Finding]:
    """Detect a pass that holds negative entropies, or the logprobs of the most probable tokens, instead of those of the
    sampled tokens."""
    for side, values in (("a", data.a), ("b", data.b)):
        recorded = getattr(data.sample, side).entropy
        entropy = data.entropy if recorded is None else recorded[data.keep]
        if entropy is not None and np.std(entropy) > MIN_OFF_NATS and data.rms() > MIN_OFF_NATS:
            left = np.abs(values + entropy)
            if np.quantile(left, 0.95) < 0.1 * float(np.median(np.abs(data.d))):
                return [_of_something_else(data, "unrelated", "negative_entropies", side)]
    for side, values, others in (("b", data.b, data.a), ("a", data.a, data.b)):
        if _are_of_most_probable(values, others):
            return [_of_something_else(data, "unrelated", "most_probable", side)]
    return []


def _are_of_most_probable(values: np.ndarray, others: np.ndarray) -> bool:
    """Return True if `values` are consistent with the logprobs of the most probable tokens, and `others` with those of
    the sampled ones.

    `values` are then never below `others`, and equal where the sampled token is the most probable one. Elsewhere the
    two probabilities belong to different tokens, so their sum is at most 1. Renormalised logprobs, by contrast, are
    slightly higher at all tokens.
    """
    if len(values) < MIN_LOGPROBS:
        return False
    raised = values - others
    equal = raised < max(MIN_OFF_NATS, 2 * -float(np.min(raised)))
    if not 0.1 < equal.mean() < 0.95 or np.min(raised) < -0.5 or raised.max() < MAX_CUT_NATS:
        return False
    fits = np.exp(values[~equal]) + np.exp(others[~equal]) <= 1 + MIN_OFF_NATS
    # The share of tokens at which the most probable token was sampled must match its mean probability.
    expected = float(np.mean(np.exp(np.minimum(values, 0.0))))
    return bool(fits.mean() > 0.995 and abs(equal.mean() - expected) < 0.1)


def find_unrelated(data: PairData) -> list[Finding]:
    """Detect that the values in the two passes are uncorrelated."""
    if data.num_kept < MIN_LOGPROBS or data.rms() < MIN_OFF_NATS:
        return []
    if min(np.std(data.a), np.std(data.b)) < MIN_SPREAD:
        return []
    correlation = max(_correlation(data.a, data.b), _correlation(_ranks(data.a), _ranks(data.b)))
    if correlation > MIN_CORRELATION:
        return []
    return [_of_something_else(data, "unrelated", "no_correlation", "b", correlation=correlation)]


def _correlation(x: np.ndarray, y: np.ndarray) -> float:
    return float(np.corrcoef(x, y)[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    return np.argsort(np.argsort(values, kind="stable"), kind="stable").astype(float)


def _of_something_else(data: PairData, code: str, signal: str, side: str, **more: float) -> Finding:
    return data.finding(
        code,
        signal,
        next=commands.sql(
            data,
            "SELECT step, seq_id, position, token_id, logprob_a, logprob_b FROM {pair} WHERE mask "
            "ORDER BY step, seq_id, position LIMIT 40",
        ),
        numbers={
            "side": data.names[side],
            "other": data.names["b" if side == "a" else "a"],
            "num_tokens": data.num_kept,
            **more,
        },
    )
