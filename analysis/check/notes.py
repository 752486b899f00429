"""Limits of a check, as codes. The sentences are in text.py."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..info import AttemptInfo
from .pair_data import PairData

FEW_TOKENS = 500
"""Number of tokens below which only gross faults can be detected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A test that the trace does not allow, or a remark on its data."""

    code: str
    """A key in text.NOTES."""
    num_tokens: int
    """Number of tokens compared individually."""
    attempts: tuple[AttemptInfo, ...] = ()
    """All training attempts; empty unless the code is `attempts`."""


def notes(data: PairData) -> list[Note]:
    """Return the notes that apply to a trace."""
    sample = data.sample
    applies = {
        "few_tokens": data.num_kept < FEW_TOKENS,
        "no_contract": not any(sample.a.contracts) or not any(sample.b.contracts),
        "no_entropies": data.entropy is None,
        "few_steps": len(np.unique(sample.steps)) < 3,
        "no_prompts": all(prompt is None for prompt in sample.prompts),
    }
    found = [Note(code=code, num_tokens=data.num_kept) for code, holds in applies.items() if holds]
    if len(data.attempts) > 1:
        found.append(Note(code="attempts", num_tokens=data.num_kept, attempts=data.attempts))
    return found
