"""Detect logprobs that only one pass normalised over the tokens allowed by a grammar."""

from __future__ import annotations

import numpy as np

from .. import commands
from ..finding import Finding
from ..pair_data import PairData, declared
from ..thresholds import MAX_MINOR_SHARE, MAX_UNTOLD_NOISE, MIN_RAISED_TOKENS, MIN_REST, MIN_SPREAD
from .numerics import allowed_noise, precisions


def find_grammar(data: PairData) -> list[tuple[Finding, np.ndarray]]:
    """Return a finding for each pass that used a grammar while the other did not, with a mask of the affected tokens,
    [N] bool.

    The contract must name the grammar, and the values must confirm it: renormalising over fewer tokens raises every
    logprob, so lower values are evidence against a grammar.
    """
    under = {side: _under_grammar(data, side) for side in "ab"}
    found = []
    for side, other in ("ab", "ba"):
        tokens = data.keep & (under[side] & ~under[other])[data.sample.seq]
        finding = _of_side(data.without(~tokens), side, other) if tokens.any() else None
        if finding is not None:
            found.append((finding, tokens))
    return found


def _under_grammar(data: PairData, side: str) -> np.ndarray:
    """Return [S] bool: True for sequences whose contract names structured outputs."""
    named = {name: declared(contract, "structured_outputs") is True for name, contract in data.contracts.items()}
    return np.array([named.get(name or "", False) for name in getattr(data.sample, side).contracts], bool)


def _of_side(data: PairData, side: str, other: str) -> Finding | None:
    values, others = getattr(data, side), getattr(data, other)
    if np.std(values) < MIN_SPREAD:
        return None
    rounding = MAX_UNTOLD_NOISE * allowed_noise(precisions(data)) * np.maximum(-np.expm1(others), MIN_REST)
    raised, lower = values - others > rounding, others - values > rounding
    if raised.sum() < MIN_RAISED_TOKENS or lower.sum() > MAX_MINOR_SHARE * (raised.sum() + lower.sum()):
        return None
    name, other_name = data.names[side], data.names[other]
    return Finding(
        code="grammar",
        signal="allowed_tokens",
        effect=data.rms(raised),
        share=float(raised.sum() / max(data.sample.compared.sum(), 1)),
        next=commands.whole_vocabulary_replay(data, other_name, int(data.sample.steps[data.seq[raised][0]])),
        numbers={
            "side": name,
            "other": other_name,
            "num_tokens": int(raised.sum()),
            "of_tokens": data.num_kept,
            "num_lower": int(lower.sum()),
            "largest": float((values - others).max()),
        },
    )
