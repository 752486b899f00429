"""Convert padded or ragged batches to flat values and lengths.

Shapes: B rows, T padded width, N tokens in all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from ..schemas.errors import InvalidRecord
from .arrow_arrays import number_array
from .staging import is_tensor, to_numpy


@dataclass(frozen=True, slots=True)
class Ragged:
    values: np.ndarray
    """[N] elements of all rows, one row after another."""
    lengths: np.ndarray
    """[B] int64. The lengths sum to N."""
    valid: np.ndarray | None = None
    """[N] bool: False where an element was not recorded. None if all elements were recorded."""

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def offsets(self) -> np.ndarray:
        """[B + 1] int32: row i is values[offsets[i]:offsets[i + 1]]."""
        return np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int32)

    @property
    def known(self) -> np.ndarray:
        return np.ones(len(self.values), bool) if self.valid is None else self.valid

    @property
    def num_known(self) -> int:
        return len(self.values) if self.valid is None else int(self.valid.sum())

    def take(self, rows: np.ndarray) -> Ragged:
        if is_every_row(rows, len(self.lengths)):
            return self
        cells = cells_of(rows, self.lengths)
        return Ragged(self.values[cells], self.lengths[rows], None if self.valid is None else self.valid[cells])

    def to_arrow(self, type: pa.ListType) -> pa.Array:
        values = number_array(self.values, type.value_type, self.valid)
        return pa.ListArray.from_arrays(number_array(self.offsets, pa.int32()), values)


def is_every_row(rows: np.ndarray, num_rows: int) -> bool:
    return len(rows) == num_rows and bool((rows == np.arange(num_rows)).all())


def cells_of(rows: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the indices of the selected rows' elements in the flattened array."""
    counts = lengths[rows]
    within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.asarray(np.repeat(np.cumsum(lengths)[rows] - counts, counts) + within)


_LONG = 1024
"""Minimum width of a batch that is flattened row by row. Copying one row takes as long as masking 1,500 cells."""


@dataclass(frozen=True, slots=True)
class Padding:
    """Positions of the tokens in a padded [B, T] batch."""

    width: int
    lengths: np.ndarray
    """[B] int64, tokens per row."""
    starts: np.ndarray | None
    """[B] int64, the column where each row's tokens begin. None if any row has a gap between tokens."""
    mask: np.ndarray

    @classmethod
    def of(cls, mask: Any, what: str = "attention mask") -> Padding:
        given = _cells(mask, what)
        if given.ndim != 2:
            raise InvalidRecord(f"{what}: got shape {given.shape}; pass [B, T], the same shape as the batch")
        flat = _narrow(given.reshape(-1), np.dtype(bool), what, np.full(*given.shape))
        cells, width = flat.reshape(given.shape), given.shape[1]
        lengths = cells.sum(axis=1, dtype=np.int64)
        starts = cells.argmax(axis=1).astype(np.int64) if width else np.zeros(len(cells), np.int64)
        last = width - cells[:, ::-1].argmax(axis=1) if width else starts
        contiguous = bool(np.all((last - starts == lengths) | (lengths == 0)))
        return cls(width, lengths, starts if contiguous else None, cells)

    def take(self, rows: np.ndarray) -> Padding:
        return Padding(
            self.width, self.lengths[rows], None if self.starts is None else self.starts[rows], self.mask[rows]
        )

    def flatten(self, cells: np.ndarray) -> np.ndarray:
        if self.starts is None or self.width < _LONG:
            return np.asarray(cells[self.mask])
        out = np.empty(int(self.lengths.sum()), cells.dtype)
        position = 0
        for row, (start, length) in enumerate(zip(self.starts.tolist(), self.lengths.tolist(), strict=True)):
            out[position : position + length] = cells[row, start : start + length]
            position += length
        return out


def flatten(data: Any, dtype: Any, padding: Padding | None, what: str) -> Ragged:
    """Flatten a batch: a padded [B, T] tensor or array, or lists with different lengths.

    `dtype` decides how values are checked: as token ids (integer dtype), as a mask (bool) or as per-token values (float
    dtype). Among per-token values, None in a list means not recorded. `what` names the batch in error messages.
    """
    dtype = np.dtype(dtype)
    if isinstance(data, Ragged):
        return data
    if not is_padded(data):
        rows = data.tolist() if isinstance(data, np.ndarray) and data.dtype == object and data.ndim == 1 else data
        if not isinstance(rows, Sequence) or isinstance(rows, (str, bytes)):
            raise InvalidRecord(f"{what}: got {shown(data)}; pass a tensor or array [B, T], or B lists")
        return _flatten_lists(rows, dtype, what)
    cells = _cells(data, what, dtype)
    if cells.ndim != 2:
        raise InvalidRecord(f"{what}: got shape {tuple(cells.shape)}; pass a batch [B, T] with its mask, or B lists")
    if padding is None:
        lengths = np.full(len(cells), cells.shape[1], np.int64)
        return Ragged(_narrow(cells.reshape(-1), dtype, what, lengths), lengths)
    if cells.shape != padding.mask.shape:
        raise InvalidRecord(
            f"{what}: got shape {cells.shape}, but the attention mask has shape {padding.mask.shape}. Pad both the "
            "same way, or pass this batch's own attention mask"
        )
    return Ragged(_narrow(padding.flatten(cells), dtype, what, padding.lengths), padding.lengths)


def is_padded(data: Any) -> bool:
    """Return True for a single tensor or array, False for a sequence of rows."""
    return is_tensor(data) or (isinstance(data, np.ndarray) and not (data.dtype == object and data.ndim == 1))


def num_rows(data: Any, what: str) -> int:
    if isinstance(data, Ragged):
        return len(data)
    shape = getattr(data, "shape", None)
    if shape is not None and len(shape):
        return int(shape[0])
    if shape is None and isinstance(data, Sequence) and not isinstance(data, (str, bytes)):
        return len(data)
    raise InvalidRecord(f"{what}: got {shown(data)}; pass a tensor or array [B, T], or B lists")


def shown(value: Any) -> str:
    text = " ".join(repr(value).split())
    text = text if len(text) <= 60 else f"{text[:57]}..."
    return "None" if value is None else f"{text} ({type(value).__name__})"


def _flatten_lists(data: Sequence[Any], dtype: np.dtype, what: str) -> Ragged:
    if (alike := _alike(data, dtype)) is not None:
        lengths = np.array([len(array) for array in alike], np.int64)
        return Ragged(_narrow(np.concatenate(alike), dtype, what, lengths), lengths)
    rows = [_row(row, dtype, what, index) for index, row in enumerate(data)]
    lengths = np.array([len(array) for array, _ in rows], np.int64)
    # Leave out empty lists: NumPy makes them float64, which would change the dtype of the concatenated values.
    filled = [array for array, _ in rows if len(array)]
    values = _narrow(np.concatenate(filled), dtype, what, lengths) if filled else np.empty(0, dtype)
    if all(valid is None for _, valid in rows):
        return Ragged(values, lengths)
    known = [np.ones(len(array), bool) if valid is None else valid for array, valid in rows]
    return Ragged(values, lengths, np.concatenate(known))


def _alike(data: Sequence[Any], dtype: np.dtype) -> list[np.ndarray] | None:
    kinds = {type(row) for row in data}
    if len(kinds) != 1 or not (kinds == {np.ndarray} or is_tensor(data[0])) or len({row.dtype for row in data}) != 1:
        return None
    if any(row.ndim != 1 for row in data):
        return None
    if kinds != {np.ndarray}:
        if dtype.kind == "i" and data[0].dtype.is_floating_point:
            return None  # _row raises the error about rounded token ids
        try:
            data = [row.numpy() for row in data]
        except (TypeError, ValueError, RuntimeError):  # NumPy lacks this dtype, or the tensor requires grad
            return None
    return list(data) if data[0].dtype.kind in _KINDS[dtype.kind] else None


def _row(row: Any, dtype: np.dtype, what: str, index: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Return a row as an array, and a [T] bool mask that is True at recorded values (None if all are recorded)."""
    if (not isinstance(row, (Sequence, np.ndarray)) and not is_tensor(row)) or isinstance(row, (str, bytes)):
        raise InvalidRecord(f"{what}: row {index} is {shown(row)}. Pass B lists, one per sequence")
    valid = None
    # NumPy would turn None into NaN. But None means "not recorded", and a NaN in the data is a recorded value.
    if isinstance(row, (list, tuple)) and _has_none(row):
        valid = np.array([item is not None for item in row], bool)
        if dtype.kind != "f":
            raise InvalidRecord(f"{what}: row {index}, token {int(valid.argmin())} is None; {_expected_values(dtype)}")
        row = [0.0 if item is None else item for item in row]
    array = _cells(row, f"{what}: row {index}", dtype)
    if array.ndim != 1:
        raise InvalidRecord(f"{what}: row {index} has shape {array.shape}. Pass a flat list, not {shown(row)}")
    if len(array) and array.dtype.kind not in _KINDS[dtype.kind]:
        raise InvalidRecord(f"{what}: row {index} is {shown(row)}; {_expected_values(dtype)}")
    return array, valid


def _has_none(row: Sequence[Any]) -> bool:
    try:
        return None in row
    except (TypeError, ValueError, RuntimeError):  # an array in the list has no single truth value
        return any(item is None for item in row)


_KINDS = {"i": "iuf", "f": "iuf", "b": "biuf"}


def _expected_values(dtype: np.dtype) -> str:
    if dtype.kind == "i":
        return f"token ids are whole numbers from 0 to {np.iinfo(dtype).max}"
    if dtype.kind == "b":
        return "mask values must be 0 or 1, or booleans"
    return f"pass numbers within the range of {dtype.name}"


def _cells(data: Any, what: str, dtype: np.dtype | None = None) -> np.ndarray:
    name = str(getattr(data, "dtype", "")).removeprefix("torch.")
    if dtype is not None and dtype.kind == "i" and name in ("bfloat16", "float16"):
        limit = 256 if name == "bfloat16" else 2048
        raise InvalidRecord(f"{what}: got {name}, which rounds token ids above {limit}. Pass integers")
    try:
        return to_numpy(data)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        reason = f" ({str(error).splitlines()[0]})" if is_tensor(data) and str(error) else ""
        needed = "pass numbers" if dtype is None else _expected_values(dtype)
        raise InvalidRecord(f"{what} is {shown(data)}{reason}; {needed}") from error


def _narrow(values: np.ndarray, dtype: np.dtype, what: str, lengths: np.ndarray) -> np.ndarray:
    if len(values) and values.dtype.kind not in _KINDS[dtype.kind]:
        raise InvalidRecord(f"{what}: got values of {values.dtype.name}; {_expected_values(dtype)}")
    with np.errstate(invalid="ignore", over="ignore"):
        out = values.astype(dtype)
        if values.dtype == dtype and dtype.kind != "i":
            return out
        wrong = _find_invalid(values, out)
    if wrong is not None and wrong.any():
        first, ends = int(wrong.argmax()), np.cumsum(lengths)
        row = int(np.searchsorted(ends, first, side="right"))
        token = first - int(ends[row] - lengths[row])
        raise InvalidRecord(f"{what}: row {row}, token {token} is {values[first]}; {_expected_values(dtype)}")
    return out


def _find_invalid(values: np.ndarray, out: np.ndarray) -> np.ndarray | None:
    """Return a mask of the values that are invalid for `out`'s dtype, or None if a quick check finds none."""
    is_float = values.dtype.kind == "f"
    if out.dtype.kind == "f":
        return np.isfinite(values) & ~np.isfinite(out) if is_float else np.asarray(values != out)
    most = np.iinfo(out.dtype).max if out.dtype.kind == "i" else np.inf
    if is_float and out.dtype.kind == "i":
        most = min(most, 2 ** (np.finfo(values.dtype).nmant + 1))  # a larger float may be a token id that was rounded
    if not is_float and (not len(values) or (values.min() >= 0 and values.max() <= most)):
        return None
    whole = np.floor(values) == values if is_float else True
    return np.asarray(~((values >= 0) & (values <= most) & (values < np.inf) & whole))
