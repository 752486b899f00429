"""Batches as they come, padded or ragged, brought to flat values and lengths.

Shapes: B rows, T padded width, N tokens of all rows together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from ..schemas.errors import InvalidRecord
from .staging import is_tensor, to_numpy


@dataclass(frozen=True, slots=True)
class Ragged:
    """Lists of differing lengths, end to end."""

    values: np.ndarray
    """[N]"""
    lengths: np.ndarray
    """[B] int64, adding up to N."""
    valid: np.ndarray | None = None
    """[N] bool, False where the value was not recorded; None when all were."""

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def offsets(self) -> np.ndarray:
        """[B + 1] int32: row i is values[offsets[i]:offsets[i + 1]]."""
        return np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int32)

    def to_arrow(self, type: pa.ListType) -> pa.Array:
        """As an Arrow list array, without copying the values."""
        mask = None if self.valid is None else ~self.valid
        values = pa.array(self.values, type.value_type, mask=mask)
        return pa.ListArray.from_arrays(pa.array(self.offsets, pa.int32()), values)


_LONG = 128
"""Width from which copying row by row is faster than picking cells by a mask."""


@dataclass(frozen=True, slots=True)
class Padding:
    """Which cells of a [B, T] batch hold tokens."""

    width: int
    lengths: np.ndarray
    """[B] int64"""
    starts: np.ndarray | None
    """[B] int64, first token of each row; None when a row's tokens do not follow each other."""
    mask: np.ndarray
    """[B, T] bool"""

    @classmethod
    def of(cls, mask: Any) -> Padding:
        """Read an attention mask [B, T]: nonzero where there is a token."""
        cells = to_numpy(mask)
        if cells.ndim != 2:
            raise InvalidRecord(
                f"attention mask: got shape {cells.shape}; give [B, T], as the batch that it belongs to"
            )
        cells = cells.astype(bool, copy=False)
        lengths = cells.sum(axis=1, dtype=np.int64)
        starts = cells.argmax(axis=1).astype(np.int64) if cells.shape[1] else np.zeros(len(cells), np.int64)
        width = cells.shape[1]
        last = width - cells[:, ::-1].argmax(axis=1) if width else starts
        contiguous = bool(np.all((last - starts == lengths) | (lengths == 0)))
        return cls(width, lengths, starts if contiguous else None, cells)

    def take(self, rows: np.ndarray) -> Padding:
        """The padding of some rows, in their order."""
        return Padding(
            self.width, self.lengths[rows], None if self.starts is None else self.starts[rows], self.mask[rows]
        )

    def flatten(self, cells: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """Copy the tokens of a [B, T] batch end to end: [N]."""
        if self.starts is None or self.width < _LONG:
            return np.asarray(cells[self.mask], dtype)
        out = np.empty(int(self.lengths.sum()), dtype)
        position = 0
        for row, (start, length) in enumerate(zip(self.starts.tolist(), self.lengths.tolist(), strict=True)):
            out[position : position + length] = cells[row, start : start + length]
            position += length
        return out


def flatten(data: Any, dtype: Any, padding: Padding | None, what: str) -> Ragged:
    """Copy a batch to flat values: a padded [B, T] tensor or array with its padding, or lists of differing lengths.

    `what` names the batch in errors. None inside a list becomes a value that was not recorded.
    """
    dtype = np.dtype(dtype)
    if isinstance(data, Ragged):
        return data
    if is_tensor(data) or isinstance(data, np.ndarray):
        cells = to_numpy(data)
        if cells.ndim != 2:
            raise InvalidRecord(f"{what}: got shape {tuple(cells.shape)}; give [B, T] with its mask, or B lists")
        return _flatten_padded(cells, dtype, padding, what)
    if not isinstance(data, Sequence):
        raise InvalidRecord(f"{what}: got {type(data).__name__}; give a tensor or array [B, T], or B lists")
    return _flatten_lists(data, dtype, what)


def _flatten_padded(cells: np.ndarray, dtype: np.dtype, padding: Padding | None, what: str) -> Ragged:
    if padding is None:
        lengths = np.full(len(cells), cells.shape[1], np.int64)
        return Ragged(cells.astype(dtype, copy=True).reshape(-1), lengths)
    if cells.shape != padding.mask.shape:
        raise InvalidRecord(
            f"{what}: got shape {cells.shape}, but the attention mask has {padding.mask.shape}; pad both alike, or pass "
            "this batch's own attention mask"
        )
    return Ragged(padding.flatten(cells, dtype), padding.lengths)


def _flatten_lists(data: Sequence[Any], dtype: np.dtype, what: str) -> Ragged:
    rows = [to_numpy(row) if is_tensor(row) or isinstance(row, np.ndarray) else row for row in data]
    try:
        lengths = np.fromiter((len(row) for row in rows), np.int64, len(rows))
    except TypeError as error:
        raise InvalidRecord(f"{what}: a row is not a list; give B lists, one a sequence") from error
    arrays = [_row(row, dtype, what, index) for index, row in enumerate(rows)]
    values = np.concatenate([array for array, _ in arrays]) if arrays else np.empty(0, dtype)
    if all(valid is None for _, valid in arrays):
        return Ragged(values, lengths)
    flags = [np.ones(len(array), bool) if valid is None else valid for array, valid in arrays]
    return Ragged(values, lengths, np.concatenate(flags))


def _row(row: Any, dtype: np.dtype, what: str, index: int) -> tuple[np.ndarray, np.ndarray | None]:
    # NumPy would read None as NaN; here None is "not recorded" and NaN is a value.
    if isinstance(row, (list, tuple)) and None in row:
        valid = np.array([item is not None for item in row], bool)
        return np.array([0 if item is None else item for item in row], dtype=dtype), valid
    try:
        return np.asarray(row, dtype=dtype).reshape(len(row)), None
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRecord(f"{what}: row {index} does not read as {dtype.name} ({error}): {row!r:.120}") from error


def num_rows(data: Any) -> int:
    """How many rows a batch has, in whatever form it comes."""
    if isinstance(data, Ragged):
        return len(data)
    return int(data.shape[0]) if hasattr(data, "shape") else len(data)
