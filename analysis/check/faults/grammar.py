"""Logprobs that only one pass normalised over the tokens allowed by a grammar."""

from __future__ import annotations

import numpy as np

from .. import commands
from ..finding import Fault, Finding
from ..hypothesis import Hypothesis
from ..pair_data import MIN_REST, PairData, declared
from ..rounding import allowed_noise

GRAMMAR = Fault(
    code="grammar",
    title="one side was sampled under a grammar, so its logprobs cover only the allowed tokens",
    broken="recording",
    evidence={
        "allowed_tokens": "{side} was sampled under a grammar (structured outputs): its logprobs cover the allowed "
        "tokens, those of {other} all tokens; of {of_tokens:,} such tokens, {num_tokens:,} are higher in {side} by "
        "more than rounding (at most {largest:.3g} nats), and {num_lower:,} are lower"
    },
)


def find_grammar(data: PairData) -> list[Hypothesis]:
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
            found.append(Hypothesis(finding=finding, tokens=tokens, gain=float("inf")))
    return found


def _under_grammar(data: PairData, side: str) -> np.ndarray:
    """Return [S] bool: True for sequences whose contract names structured outputs."""
    named = {name: declared(contract, "structured_outputs") is True for name, contract in data.contracts.items()}
    return np.array([named.get(name or "", False) for name in getattr(data.sample, side).contracts], bool)


def _of_side(data: PairData, side: str, other: str) -> Finding | None:
    values, others = getattr(data, side), getattr(data, other)
    if np.std(values) < 1e-3:
        return None
    rounding = allowed_noise(data) * np.maximum(-np.expm1(others), MIN_REST)
    raised, lower = values - others > rounding, others - values > rounding
    if raised.sum() < 10 or lower.sum() > 0.05 * (raised.sum() + lower.sum()):
        return None
    name, other_name = data.names[side], data.names[other]
    return GRAMMAR.finding(
        data,
        "allowed_tokens",
        raised,
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
