"""Telling weights that were rounded to few values, with scales that nobody recorded.

Shapes: R rows that are looked at, C columns.
"""

from __future__ import annotations

from typing import Any

NUM_ROWS = 64
MAX_VALUES = 256
"""What eight bits hold."""
MIN_TIMES_MORE = 2
"""Times as many different values as that a row of the trainer's has."""
MIN_COSINE_SCORE = 6.0
"""Standard deviations of what chance gives, by which the two sides' rows must point the same way."""


def values_a_row(own: Any, coarse: Any) -> int | None:
    """The most different values that a row of `coarse` has where its rows are those of `own`, rounded to few; else None."""
    if own.numel() < 2:
        return None
    coarse_RC = _some_rows(coarse)
    own_RC, coarse_RC = _some_rows(own).to(coarse_RC).float(), coarse_RC.float()
    count = max(len(row.unique()) for row in coarse_RC)
    if not 2 <= count <= MAX_VALUES or min(len(row.unique()) for row in own_RC) < MIN_TIMES_MORE * count:
        return None
    own_RC, coarse_RC = own_RC.double(), coarse_RC.double()
    cosine = (own_RC * coarse_RC).sum() / (own_RC.norm() * coarse_RC.norm())
    return count if float(cosine) * own_RC.numel() ** 0.5 > MIN_COSINE_SCORE else None


def _some_rows(tensor: Any) -> Any:
    rows = tensor.reshape(-1, tensor.shape[-1])
    return rows[:: -(-len(rows) // NUM_ROWS)]
