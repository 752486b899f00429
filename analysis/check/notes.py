"""What could not be asked of a trace, and what to know of the answer, in codes; text.py has the sentences."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..info import AttemptInfo
from .pair_data import PairData
from .thresholds import FEW_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A question that this trace leaves open, or a remark on what was judged."""

    code: str
    """Of text.NOTES."""
    num_tokens: int
    """Tokens that were compared one by one."""
    attempts: tuple[AttemptInfo, ...] = ()
    """Of the code `attempts`: every attempt at training."""


def notes(data: PairData) -> list[Note]:
    """All that applies to this trace."""
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
