"""What a sequence's share of the loss is divided by, which its micro-batch and its optimizer step decide."""

from __future__ import annotations

import numpy as np

from ...schemas.errors import CannotReplay, option
from ...schemas.loss import Loss
from .update import LossRow, Update

Divisors = dict[str, tuple[float, float]]
"""A row's key -> two numbers that its loss is divided by, one after the other, as a trainer divides a mean over a
micro-batch by the number of these."""


def divisors(loss: Loss, update: Update) -> Divisors:
    """Each row's divisors. Raises CannotReplay for a constant that the loss does not tell."""
    places, num_rows = update.places, len(update.rows)
    alike = len({len(rows) for rows in places.values()}) == 1
    found: Divisors = {}
    for rows in places.values():
        tokens = max(1.0, float(sum(entry.num_tokens for entry in rows)))
        sequences = (float(len(rows)), float(len(places))) if alike else (float(num_rows), 1.0)
        if loss.aggregation == "token_mean":
            pair = (max(1.0, float(update.num_tokens)), 1.0)
        elif loss.aggregation == "batch_token_mean":
            whole = np.float32(max(1, update.step_tokens)) * np.float32(len(places))
            pair = (float(whole / np.float32(max(1, update.step_places))), 1.0)
        elif loss.aggregation == "micro_token_mean":
            pair = (tokens, float(len(places)))
        elif loss.aggregation == "constant":
            if loss.max_tokens is None:
                raise CannotReplay(
                    f"loss: aggregation constant has no max_tokens; say it with {option('loss', 'max_tokens=N')}"
                )
            pair = (sequences[0] * loss.max_tokens, sequences[1])
        else:
            pair = sequences
        found |= {key_of(entry): pair for entry in rows}
    return found


def key_of(entry: LossRow) -> str:
    """A row's name within its optimizer step: a sequence may be in it more than once."""
    return f"{entry.row.seq_id} {entry.row.iteration}"
