"""Chosen sequences as plain values, for a renderer.

Shapes: T shown response tokens of one sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

FINITE, NOT_RECORDED, NAN, INFINITE = 0, 1, 2, 3
"""State of a pass's value for a token: a number; NULL or no row of scores; NaN; an infinity."""

WORST, TYPICAL, RANDOM, WORST_OF_STEP = "worst", "typical", "random", "worst of step"
"""Why a sequence was chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSample:
    """One sequence: its identity, the mismatch of its passes, and its tokens.

    d = logprob(a) - logprob(b) of the pair, nats; sums are over all response tokens that the loss counts and that have a finite
    logprob in both passes. Scores are from the first inner iteration. Texts were made `visible` but are not escaped.
    """

    step: int
    seq_id: str
    group_id: str | None
    """None: not recorded."""
    why: tuple[str, ...]
    """Reasons it was chosen; codes above."""
    num_tokens: int
    """Tokens of the whole response."""
    first_token: int
    """Index of the first shown token in the response; 0 unless the response is shown in part."""
    reward: float | None
    advantage: float | None
    """Advantage of the whole response; None if not recorded, or recorded per token."""
    policy_version: int | None
    """Optimizer updates of the sampling weights."""
    finish_reason: str | None
    """`stop`, `length`, or another reason of the engine."""
    sum_d: float | None
    """Nats; None if no token is comparable; same for `mean_abs_d` and `max_abs_d`."""
    mean_abs_d: float | None
    max_abs_d: float | None
    prompt: tuple[tuple[int, str], ...]
    """(token id, text) of the prompt's last tokens."""
    num_prompt_tokens: int | None
    """Tokens of the whole prompt; None if not recorded."""
    ids: np.ndarray
    """[T] int32 token ids."""
    texts: list[str]
    """[T]"""
    logprobs: Mapping[str, np.ndarray]
    """Pass -> [T] float32, nats, as recorded; NaN if missing."""
    state: Mapping[str, np.ndarray]
    """Pass -> [T] int8: FINITE, NOT_RECORDED, NAN or INFINITE."""
    mask: np.ndarray
    """[T] bool: True if the loss counts the token; False for tool output and masked parts."""
    advantages: np.ndarray | None
    """[T] float32 if the advantage differs by token; else None, see `advantage`."""
    entropy: np.ndarray | None
    """[T] float32, nats, from pass b, else pass a; NaN if missing; None if neither has entropies."""
    bias: np.ndarray | None
    """[T] float64: bias of the token's contribution to the objective, in the unit of the advantage (see analysis.objective),
    before the loss weights tokens; NaN for tokens that do not count; None: see TokenSamples.bias_from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSamples:
    """Chosen sequences of one run."""

    sequences: tuple[TokenSample, ...]
    """Worst first, then typical, random and worst-of-step sequences."""
    choice: str
    """Text: how many steps and sequences were searched, and what the words of `why` mean."""
    text_from: str
    """Text: the tokenizer that decoded the tokens, or why only ids are shown."""
    bias_from: str
    """Text: the loss of the bias, or why there is no bias."""
    passes: tuple[str, ...]
    """The passes with logprobs, those of the pair first."""
