"""Which rows go through the model together, and how they are padded.

Shapes: B rows of a forward, W its width, K its last positions that are scored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from ..schemas.errors import CannotReplay
from .recorded import RecordedRow

LEFT, RIGHT = "left", "right"


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """One forward of the model."""

    rows: tuple[RecordedRow, ...]
    ids_BW: np.ndarray
    """int64"""
    mask_BW: np.ndarray
    """int64: 1 where there is a token that attention sees."""
    first_B: np.ndarray
    """int64: place of each row's first response token."""

    @property
    def num_kept(self) -> int:
        """K: positions from the end that hold every response token."""
        return int(self.ids_BW.shape[1] - self.first_B.min())

    def responses(self, values_BK: np.ndarray) -> list[np.ndarray]:
        """Cut each row's response out of what was scored of the last K positions."""
        begin = self.ids_BW.shape[1] - values_BK.shape[1]
        return [
            values_BK[index, first - begin : first - begin + len(row.response_ids)]
            for index, (row, first) in enumerate(zip(self.rows, self.first_B, strict=True))
        ]


def forwards(
    rows: Sequence[RecordedRow], pad_id: int, *, batch_size: int | None = None, padding: str = LEFT
) -> list[ForwardBatch]:
    """Put rows together as they were recorded, or `batch_size` at a time in the same order and width.

    With `padding` right, every row begins at place 0 and the padding follows its response.
    """
    groups = [list(group) for _, group in groupby(rows, key=lambda row: (row.writer, row.forward_id))]
    if batch_size is not None:
        by_writer = [list(group) for _, group in groupby(rows, key=lambda row: row.writer)]
        groups = [part[i : i + batch_size] for part in by_writer for i in range(0, len(part), batch_size)]
    return [_forward(group, pad_id, padding) for group in groups]


def _forward(rows: Sequence[RecordedRow], pad_id: int, padding: str) -> ForwardBatch:
    before = max(row.pad_left + len(row.prompt_ids) for row in rows)
    after = max(len(row.response_ids) + row.pad_right for row in rows)
    ids_BW = np.full((len(rows), before + after), pad_id, np.int64)
    mask_BW = np.zeros_like(ids_BW)
    first_B = np.zeros(len(rows), np.int64)
    for index, row in enumerate(rows):
        first_B[index] = before if padding == LEFT else len(row.prompt_ids)
        start = first_B[index] - len(row.prompt_ids)
        stop = first_B[index] + len(row.response_ids)
        ids_BW[index, start : first_B[index]] = row.prompt_ids
        ids_BW[index, first_B[index] : stop] = row.response_ids
        # A response that the trainer masked out as a whole was not seen by attention either.
        mask_BW[index, start : stop if row.scored.any() or not len(row.scored) else first_B[index]] = 1
    return ForwardBatch(rows=tuple(rows), ids_BW=ids_BW, mask_BW=mask_BW, first_B=first_B)


def check_tokens(rows: Sequence[RecordedRow], config: Mapping[str, Any]) -> None:
    """Raise CannotReplay when a token is outside of the model's vocabulary."""
    text = config.get("text_config") or config
    vocab_size = int(text["vocab_size"])
    for row in rows:
        for name, ids in (("prompt", row.prompt_ids), ("response", row.response_ids)):
            wrong = ids[(ids < 0) | (ids >= vocab_size)]
            if len(wrong):
                raise CannotReplay(
                    f"sequence {row.seq_id!r}: its {name} holds token {wrong[0]}, outside of the model's vocabulary of "
                    f"{vocab_size:,}; is this the model that was trained?"
                )
