"""Which rows go through the model together, and how they are padded or packed.

Shapes: B rows of a forward, W its width, K its last positions that are scored, N scored tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from ..schemas.errors import CannotReplay
from .recorded import RecordedRow

LEFT, PACKED = "left", "packed"
PACKED_TOKENS = {"cpu": 2048, "cuda": 8192}
"""Device -> tokens of a packed forward, where no number of rows is given; a longer row goes alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedBatch:
    """One forward of rows side by side, padded to one width."""

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

    @property
    def width(self) -> int:
        """W"""
        return int(self.ids_BW.shape[1])

    @property
    def scored_N(self) -> np.ndarray:
        """Places of the response tokens, row by row, in the rows laid end to end."""
        starts = self.first_B + np.arange(len(self.rows)) * self.width
        return _spans(starts, self.rows)

    def last(self, values_BK: Any) -> Any:
        """[N] of the response tokens, row by row, out of what was scored of the last K positions."""
        begin, kept = self.width - values_BK.shape[1], values_BK.shape[1]
        return values_BK.reshape(-1)[_spans(self.first_B - begin + np.arange(len(self.rows)) * kept, self.rows)]

    @property
    def tokens_BW(self) -> np.ndarray:
        """bool: true where a row's prompt or response lies."""
        left_B, right_B = self.padding()
        place_W = np.arange(self.width)
        return np.asarray((place_W >= left_B[:, None]) & (place_W < (self.width - right_B)[:, None]))

    def padding(self) -> tuple[np.ndarray, np.ndarray]:
        """[B] tokens of padding before each row's prompt, and after its response."""
        left_B = self.first_B - [len(row.prompt_ids) for row in self.rows]
        return left_B, self.width - self.first_B - [len(row.response_ids) for row in self.rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """One forward of rows end to end, without padding; attention keeps to each row."""

    rows: tuple[RecordedRow, ...]
    ids_W: np.ndarray
    """int64: prompt and response of each row."""
    positions_W: np.ndarray
    """int64: each token's position in its row."""
    ends_B: np.ndarray
    """int64: place after each row's last token."""

    @property
    def width(self) -> int:
        """W"""
        return len(self.ids_W)

    @property
    def scored_N(self) -> np.ndarray:
        """Places of the response tokens, row by row."""
        return _spans(self.ends_B - [len(row.response_ids) for row in self.rows], self.rows)

    @property
    def tokens_BW(self) -> np.ndarray:
        """[1, W] bool: every place holds a token."""
        return np.ones((1, self.width), bool)

    def padding(self) -> tuple[np.ndarray, np.ndarray]:
        """None on either side."""
        return np.zeros(len(self.rows), np.int64), np.zeros(len(self.rows), np.int64)


ForwardBatch = PaddedBatch | PackedBatch


def responses(batch: ForwardBatch, values_N: np.ndarray) -> list[np.ndarray]:
    """Cut what was scored of a batch's response tokens into its rows."""
    return np.split(values_N, np.cumsum([len(row.response_ids) for row in batch.rows])[:-1])


def forwards(
    rows: Sequence[RecordedRow],
    pad_id: int,
    *,
    batch_size: int | None = None,
    padding: str = LEFT,
    device: str = "cpu",
) -> list[ForwardBatch]:
    """Put rows together as they were recorded, or `batch_size` at a time in the same order and width.

    With `padding` right, every row begins at place 0 and the padding follows its response. With `packed`, rows of like
    length lie end to end, up to the device's PACKED_TOKENS or `batch_size` rows a forward.
    """
    if padding == PACKED:
        return [_packed(group) for group in _packs(rows, batch_size, PACKED_TOKENS[device])]
    groups = [list(group) for _, group in groupby(rows, key=lambda row: (row.writer, row.forward_id))]
    if batch_size is not None:
        by_writer = [list(group) for _, group in groupby(rows, key=lambda row: row.writer)]
        groups = [part[i : i + batch_size] for part in by_writer for i in range(0, len(part), batch_size)]
    return [_padded(group, pad_id, padding) for group in groups]


def _spans(starts_B: np.ndarray, rows: Sequence[RecordedRow]) -> np.ndarray:
    lengths = [len(row.response_ids) for row in rows]
    return np.concatenate([np.arange(start, start + n) for start, n in zip(starts_B, lengths, strict=True)])


def _padded(rows: Sequence[RecordedRow], pad_id: int, padding: str) -> PaddedBatch:
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
    return PaddedBatch(rows=tuple(rows), ids_BW=ids_BW, mask_BW=mask_BW, first_B=first_B)


def _packs(rows: Sequence[RecordedRow], batch_size: int | None, most: int) -> Iterator[list[RecordedRow]]:
    """Rows that share a packed forward: sorted by length, so that forwards take about as long as each other."""
    pack: list[RecordedRow] = []
    tokens = 0
    for row in sorted(rows, key=lambda row: -row.num_tokens):
        full = len(pack) == batch_size if batch_size is not None else tokens + row.num_tokens > most
        if pack and full:
            yield pack
            pack, tokens = [], 0
        pack.append(row)
        tokens += row.num_tokens
    if pack:
        yield pack


def _packed(rows: Sequence[RecordedRow]) -> PackedBatch:
    return PackedBatch(
        rows=tuple(rows),
        ids_W=np.concatenate([ids for row in rows for ids in (row.prompt_ids, row.response_ids)]).astype(np.int64),
        positions_W=np.concatenate([np.arange(row.num_tokens) for row in rows]),
        ends_B=np.cumsum([row.num_tokens for row in rows]),
    )


def check_tokens(rows: Sequence[RecordedRow], config: Mapping[str, Any]) -> None:
    """Raise CannotReplay when a token is outside of the model's vocabulary, or a prompt has none."""
    text = config.get("text_config") or config
    vocab_size = int(text.get("vocab_size", 1 << 31))
    for row in rows:
        if not len(row.prompt_ids):
            raise CannotReplay(f"sequence {row.seq_id!r}: has no prompt, so nothing predicts its first response token")
        for name, ids in (("prompt", row.prompt_ids), ("response", row.response_ids)):
            wrong = ids[(ids < 0) | (ids >= vocab_size)]
            if len(wrong):
                raise CannotReplay(
                    f"sequence {row.seq_id!r}: its {name} holds token {wrong[0]}, outside of the model's vocabulary of "
                    f"{vocab_size:,}; is this the model that was trained?"
                )
