"""What is shown of chosen sequences: plain values, for whatever draws them.

Shapes: T shown response tokens of one sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

FINITE, NOT_RECORDED, NAN, INFINITE = 0, 1, 2, 3
"""What a pass gave a token: a number; nothing (NULL, or no row of scores); NaN; an infinity."""

WORST, TYPICAL, RANDOM, WORST_OF_STEP = "worst", "typical", "random", "worst of step"
REASONS = (WORST, TYPICAL, RANDOM, WORST_OF_STEP)
"""Why a sequence was chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSample:
    """One sequence: who it is, how far its passes lie apart, and its tokens.

    d = logprob(a) - logprob(b) of the pair, nats; sums are over the tokens of the whole response that the loss counts and
    that have a finite logprob in both passes. Scores are those of the first inner iteration. Texts have been through
    `visible`, and still have to be escaped.
    """

    step: int
    seq_id: str
    group_id: str | None
    """None: not recorded."""
    why: tuple[str, ...]
    """Of REASONS, one at least."""
    num_tokens: int
    """Of the whole response."""
    first_token: int
    """Place in the response of the first shown token, from 0; 0 unless the response is longer than what is shown of it."""
    reward: float | None
    advantage: float | None
    """Where one value serves the whole response; None: not recorded, or by token."""
    policy_version: int | None
    """Optimizer updates that the sampling weights had seen."""
    finish_reason: str | None
    """`stop`, `length`, or the engine's own word."""
    sum_d: float | None
    """Nats; None where no token compares, and the next two alike."""
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
    """Pass -> [T] float32, nats, as recorded; NaN where there is none."""
    state: Mapping[str, np.ndarray]
    """Pass -> [T] int8: FINITE, NOT_RECORDED, NAN or INFINITE."""
    mask: np.ndarray
    """[T] bool: whether the loss counts the token; false for tool output and masked parts."""
    advantages: np.ndarray | None
    """[T] float32 where the advantage differs by token; None: see advantage."""
    entropy: np.ndarray | None
    """[T] float32, nats, as pass b recorded it, else pass a; NaN where there is none; None: neither has any."""
    bias: np.ndarray | None
    """[T] float64: what the mismatch adds to the token's contribution to the objective, in the unit of the advantage (see
    analysis.objective), before the loss weighs tokens; NaN where objective counts none; None: see TokenSamples.bias_from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSamples:
    """Chosen sequences of one run."""

    sequences: tuple[TokenSample, ...]
    """The worst first, then typical, random and worst-of-step ones."""
    choice: str
    """Sentences: of how many steps and sequences these are, and what the words of `why` mean."""
    text_from: str
    """A sentence: which tokenizer made the texts, or why they are ids."""
    bias_from: str
    """A sentence: of which loss the bias is, or why there is none."""
    passes: tuple[str, ...]
    """The passes whose logprobs are given, those of the pair first; only passes that scored anything."""
