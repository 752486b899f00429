"""Chosen sequences as plain values, for a renderer.

Shapes: T shown response tokens of one sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

FINITE, NOT_RECORDED, NAN, INFINITE = 0, 1, 2, 3
"""A pass's value for a token: a number; nothing (NULL, or no row of scores); NaN; an infinity."""

WORST, TYPICAL, RANDOM, WORST_OF_STEP = "worst", "typical", "random", "worst of step"
"""Why a sequence was chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSample:
    """One sequence: its identity, the mismatch of its passes, and its tokens.

    d = logprob(a) - logprob(b) of the pair, nats; sums are over tokens of the whole response that the loss counts and that
    have a finite logprob in both passes. Scores are from the first inner iteration. Texts have been through `visible` and
    still have to be escaped.
    """

    step: int
    seq_id: str
    group_id: str | None
    """None: not recorded."""
    why: tuple[str, ...]
    """One or several of the reasons above."""
    num_tokens: int
    """Of the whole response."""
    first_token: int
    """Index of the first shown token in the response; 0 unless the response is shown in part."""
    reward: float | None
    advantage: float | None
    """The value of the whole response; None: not recorded, or by token."""
    policy_version: int | None
    """Optimizer updates of the sampling weights."""
    finish_reason: str | None
    """`stop`, `length`, or the engine's own word."""
    sum_d: float | None
    """Nats; None if no token is comparable; same for `mean_abs_d` and `max_abs_d`."""
    mean_abs_d: float | None
    max_abs_d: float | None
    prompt: tuple[tuple[int, str], ...]
    """(token id, text) of the prompt's last tokens."""
    num_prompt_tokens: int | None
    """Of the whole prompt; None: the prompt was not recorded."""
    ids: np.ndarray
    """[T] int32 token ids."""
    texts: list[str]
    """[T]"""
    logprobs: Mapping[str, np.ndarray]
    """Pass -> [T] float32, nats, as recorded; NaN if missing."""
    state: Mapping[str, np.ndarray]
    """Pass -> [T] int8: FINITE, NOT_RECORDED, NAN or INFINITE."""
    mask: np.ndarray
    """[T] bool: whether the loss counts the token; false for tool output and masked parts."""
    advantages: np.ndarray | None
    """[T] float32 if the advantage differs by token; None: see advantage."""
    entropy: np.ndarray | None
    """[T] float32, nats, from pass b, else pass a; NaN if missing; None: neither has any."""
    bias: np.ndarray | None
    """[T] float64: bias of the token's contribution to the objective, in the unit of the advantage (see analysis.objective),
    before the loss weighs tokens; NaN for tokens that do not count; None: see TokenSamples.bias_from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSamples:
    """Chosen sequences of one run."""

    sequences: tuple[TokenSample, ...]
    """The worst first, then typical, random and worst-of-step ones."""
    choice: str
    """How many steps and sequences were searched, and what the words of `why` mean."""
    text_from: str
    """Which tokenizer made the texts, or why they are ids."""
    bias_from: str
    """Under which loss the bias is, or why there is none."""
    passes: tuple[str, ...]
    """The passes with logprobs, those of the pair first."""
