"""Detect faults common to both passes, which do not show in d: a shared placeholder, or the wrong unit."""

from __future__ import annotations

import numpy as np

from .. import commands
from ..finding import Finding
from ..pair_data import PairData
from ..thresholds import (
    MAX_CONSTANTS,
    MAX_SHARED_UNIT_SCORE,
    MIN_CONSTANT_TOKENS,
    MIN_LOGPROBS,
    MIN_SHARED_COUNT,
    MIN_SHARED_UNIT_SCORE,
    MIN_UNCERTAIN_ENTROPY,
    SHARED_OVER_CHANCE,
)

_UNITS = {"log2": float(np.log(2.0)), "log10": float(np.log(10.0))}
"""Unit in which both passes may have been recorded instead of nats -> nats per unit."""
_WINDOW_NATS = 0.05
"""Maximum distance, nats, between a constant and the nearby values that show how often a value repeats by chance."""
_TIE_NATS = 4e-3
"""Maximum distance, nats, between a value and -ln 2, ..., -ln 8 for it to count as a tie between logits: the largest
rounding error of -ln 8 in bfloat16."""


def find_shared_constants(data: PairData) -> list[tuple[Finding, np.ndarray]]:
    """Return a finding for each value that both passes share far more often than nearby values, with a mask of the
    tokens that have it, [N] bool."""
    same = data.keep & (data.sample.a.logprobs == data.sample.b.logprobs)
    values, counts = np.unique(data.sample.a.logprobs[same], return_counts=True)
    often = np.argsort(-counts, kind="stable")[:MAX_CONSTANTS]
    found = []
    for value in (float(values[i]) for i in often if counts[i] >= MIN_SHARED_COUNT):
        where = same & (data.sample.a.logprobs == value)
        if _is_shared_constant(data, value, where):
            found.append((_constant(data, value, where), where))
    return found


def _is_shared_constant(data: PairData, value: float, where: np.ndarray) -> bool:
    # Each context is counted once, because a repeated context repeats the value.
    contexts = len(np.unique(data.sample.token_keys[where]))
    if contexts < MIN_SHARED_COUNT or len(np.unique(data.sample.tokens[where])) < MIN_CONSTANT_TOKENS:
        return False
    if value == 0.0:
        return _is_no_certainty(data, where)
    if value > -_WINDOW_NATS or any(abs(value + np.log(ties)) < _TIE_NATS for ties in range(2, 9)):
        return False  # near 0, many tokens share a float32 value, and tied logits give -ln 2, -ln 3, ...
    near = data.keep & ~where & (np.abs(data.sample.a.logprobs - value) < _WINDOW_NATS)
    _, counts = np.unique(data.sample.a.logprobs[near], return_counts=True)
    usual = float(np.quantile(counts, 0.9)) if len(counts) else 1.0
    return bool(contexts > SHARED_OVER_CHANCE * usual)


def _is_no_certainty(data: PairData, where: np.ndarray) -> bool:
    """Return True if the tokens in `where`, [N] bool, which have a logprob of 0, were not certain because their entropy
    is above 0."""
    for side in (data.sample.a, data.sample.b):
        if side.entropy is not None and np.isfinite(side.entropy[data.keep]).all():
            at, elsewhere = float(np.mean(side.entropy[where])), float(np.mean(side.entropy[data.keep & ~where]))
            return at > max(MIN_UNCERTAIN_ENTROPY, 0.25 * elsewhere)
    return False


def _constant(data: PairData, value: float, where: np.ndarray) -> Finding:
    return Finding(
        code="placeholders",
        signal="constant_in_both",
        effect=0.0,
        share=float(where.sum() / max(data.sample.compared.sum(), 1)),
        next=commands.sql(
            data,
            "SELECT step, seq_id, position, token_id, mask, logprob_a, logprob_b FROM {pair} WHERE "
            f"logprob_a = {value!r}::FLOAT AND logprob_b = logprob_a LIMIT 20",
        ),
        numbers={
            **data.names,
            "value": value,
            "num_tokens": int(where.sum()),
            "num_sequences": len(np.unique(data.sample.seq[where])),
        },
    )


def find_shared_unit(data: PairData) -> list[Finding]:
    """Detect that both passes are in the same unit other than nats: only in the correct unit does logprob + entropy
    average to 0."""
    entropy = data.entropy
    if entropy is None or data.num_kept < MIN_LOGPROBS or data.rms() > np.std(data.a) / 2:
        return []
    if abs(_score(data, data.a + entropy)) < MIN_SHARED_UNIT_SCORE:
        return []
    fits = {unit: abs(_score(data, data.a * nats + entropy)) for unit, nats in _UNITS.items()}
    unit = min(fits, key=lambda each: fits[each])
    if fits[unit] > MAX_SHARED_UNIT_SCORE:
        return []
    return [
        data.finding(
            "log_base",
            "shared_unit",
            next=commands.sql(
                data,
                'SELECT "pass", avg(list_avg(logprobs)) AS mean_logprob, avg(list_avg(entropy)) AS mean_entropy '
                "FROM scores GROUP BY ALL ORDER BY ALL",
            ),
            numbers={
                **data.names,
                "unit": unit,
                "mean_logprob": float(data.a.mean()),
                "mean_entropy": float(entropy.mean()),
            },
        )
    ]


def _score(data: PairData, values: np.ndarray) -> float:
    """Return the mean of `values`, [K], divided by its standard error."""
    return float(values.mean() / max(float(values.std()) / np.sqrt(len(values)), 1e-12))
