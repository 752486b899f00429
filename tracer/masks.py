"""Attention masks: reading padding from them, and detecting padding without a mask.

Shapes: B rows, T padded width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..schemas.errors import InvalidRecord
from .ragged import Padding, is_padded
from .staging import to_numpy

MIN_RUN = 2
"""Minimum run of one token at a row's edge that may be padding; the model itself writes a single end token."""
MIN_LONGEST_RUN = 4
"""Minimum length of a batch's longest run of one token for a padding warning; chance repeats are shorter."""
MIN_SHARE = 0.25
"""Minimum share of rows that begin or end with repeats of one token for a padding warning; padding is in most rows."""

Warn = Callable[[str, str], None]
"""Function that is called with a key, so that each warning is given only once, and the warning's sentence."""


def padding_of(mask: Any, ids: Any, side: str, where: str, warn: Warn | None) -> Padding | None:
    """Return the padding of `response` or `prompt` ids, or None for lists; warn if ids without a mask look padded.

    `warn` is None for a framework's data, which comes with masks and may have empty rows.

    Raises InvalidRecord for a mask without a batch, and for one that leaves no token.
    """
    name = f"{side}_attention_mask"
    if mask is None:
        sentence = unmasked_padding(ids, f"{where}, {side}_ids", name) if warn and is_padded(ids) else None
        if warn and sentence:
            warn(name, sentence)
        return None
    if not is_padded(ids):
        came = "not given" if ids is None else "given as lists, which have no padding"
        raise InvalidRecord(
            f"{where}, {name}: {side}_ids were {came}; give {side}_ids as a tensor or array [B, T] with it, or lists "
            "without it"
        )
    padding = Padding.of(mask, f"{where}, {name}")
    empty = np.flatnonzero(padding.lengths == 0)
    if warn and padding.width and len(empty):
        if len(empty) == len(padding.lengths):
            raise InvalidRecord(f"{where}, {name}: contains only 0, so no row has a token; give 1 for each token")
        warn(
            f"{name} of empty rows",
            f"{where}, {name}: row {empty[0]} contains only 0 ({len(empty)} of {len(padding.lengths)} rows do), so it "
            f"is recorded without tokens; to exclude tokens from the loss, use response_mask",
        )
    return padding


def unmasked_padding(ids: Any, what: str, mask_name: str) -> str | None:
    """Return a sentence on cells in a [B, T] batch that look like padding; None if there are none.

    Rows look padded if they begin or end in repeats of one token, the same in all of them, and some row does not. The
    model may also repeat itself, so this is a warning and not an error.
    """
    cells = to_numpy(ids)
    if cells.ndim != 2 or cells.shape[1] < 2 or len(cells) < 2 or cells.dtype.kind not in "iuf":
        return None
    for side, run_B, edge_B in (("begin", _runs(cells), cells[:, 0]), ("end", _runs(cells[:, ::-1]), cells[:, -1])):
        repeats = run_B >= MIN_RUN
        if not repeats.any() or repeats.all():
            continue
        tokens, counts = np.unique(edge_B[repeats], return_counts=True)
        token = tokens[counts.argmax()]
        padded = repeats & (edge_B == token)
        longest = int(run_B[padded].max())
        if padded.mean() >= MIN_SHARE and longest >= MIN_LONGEST_RUN:
            return (
                f"{what}: {padded.sum()} of {len(cells)} rows {side} with up to {longest} repeats of token {token}, "
                f"which looks like padding; without {mask_name}, every cell is recorded as a token. Give that mask, or "
                f"lists without padding"
            )
    return None


def _runs(cells: np.ndarray) -> np.ndarray:
    """Return [B]: the length of the run of equal cells at the beginning of each row."""
    other = cells != cells[:, :1]
    return np.where(other.any(axis=1), other.argmax(axis=1), cells.shape[1])
