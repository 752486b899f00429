"""Data classes for chosen sequences, ready to be rendered.

Shapes: T shown response tokens in one sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

FINITE, NOT_RECORDED, NAN, INFINITE = 0, 1, 2, 3
"""State of a pass's value for a token: a number; NULL or no row of scores; NaN; an infinity."""

WORST, TYPICAL, RANDOM, WORST_OF_STEP = "worst", "typical", "random", "worst of step"
"""Codes for the reasons why a sequence was chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSample:
    """One chosen sequence: its identity, the mismatch between two passes, and its tokens.

    d = logprob(a) - logprob(b) of the pair, nats; sums are over all response tokens that the loss counts and that have a finite
    logprob in both passes. Scores are from the first inner iteration. Texts were made `visible` but are not escaped.
    """

    step: int
    seq_id: str
    group_id: str | None
    """Group of sequences that share a prompt; None if not recorded."""
    why: tuple[str, ...]
    """Reasons why the sequence was chosen: WORST, TYPICAL, RANDOM or WORST_OF_STEP."""
    num_tokens: int
    """Number of tokens in the whole response."""
    first_token: int
    """Index within the response of the first shown token; 0 if the beginning of the response is shown."""
    reward: float | None
    advantage: float | None
    """Advantage of the whole response; None if not recorded, or recorded per token."""
    policy_version: int | None
    """Number of optimizer updates after which the sampling weights were taken; None if not recorded."""
    finish_reason: str | None
    """Reason the engine gave for ending the response, such as `stop` or `length`; None if not recorded."""
    sum_d: float | None
    """Sum of d, nats; None if no token is comparable. `mean_abs_d` and `max_abs_d` are in nats or None, too."""
    mean_abs_d: float | None
    max_abs_d: float | None
    prompt: tuple[tuple[int, str], ...]
    """(token id, text) for each of the prompt's last tokens."""
    num_prompt_tokens: int | None
    """Number of tokens in the whole prompt; None if not recorded."""
    ids: np.ndarray
    """[T] int32 token ids."""
    texts: list[str]
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSamples:
    """Chosen sequences of one run."""

    sequences: tuple[TokenSample, ...]
    """The chosen sequences: worst sequences first, then typical and random sequences, then the worst of each step."""
    choice: str
    """Text that states how many steps and sequences were searched, and explains the reasons in `why`."""
    text_from: str
    """Text that names the tokenizer used to decode the tokens, or explains why only ids are shown."""
    passes: tuple[str, ...]
    """Names of the passes with logprobs; the passes of the pair come first."""
