"""A part of a large trace, for figures that would otherwise take longer than all others together."""

from __future__ import annotations

import numpy as np

from ..trace.database import Database
from ..trace.sampling import evenly_spaced, tokens_by_step
from .text import steps_read

WHOLE = 30_000_000
"""Tokens up to which a run is read whole."""
MOST_TOKENS = 5_000_000
"""Tokens that are read of a larger one, unless a single step has more."""


def without_most_steps(database: Database) -> tuple[Database, str]:
    """A database of steps spread over the run that have `MOST_TOKENS` tokens together, and which those are, in words."""
    tokens = tokens_by_step(database)
    total = sum(tokens.values())
    if total <= WHOLE:
        return database, steps_read(len(tokens), len(tokens))
    kept = evenly_spaced(list(tokens), max(1, int(len(tokens) * MOST_TOKENS / total)))
    part = Database(database.sources[0])
    part.keep_steps(kept)
    return part, steps_read(len(kept), len(tokens))


def num_steps_within(num_tokens: int, num_steps: int) -> int:
    """Steps of a run that have `MOST_TOKENS` tokens together: 200 at most, 10 at least."""
    return int(np.clip(MOST_TOKENS * num_steps / max(num_tokens, 1), 10, 200))
