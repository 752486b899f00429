"""Build Arrow arrays directly from buffers.

`pa.array` and `pa.scalar` import pandas to inspect their input. During training that import takes 0.3 to 1 s and holds
the GIL. The functions in this module take microseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def number_array(
    values_B: Sequence[Any] | np.ndarray, type: pa.DataType, valid_B: np.ndarray | None = None
) -> pa.Array:
    """Build an array that is NULL where `valid_B` is False and shares memory with `values_B` if the dtype matches."""
    if pa.types.is_boolean(type):
        buffer = pa.py_buffer(np.packbits(np.asarray(values_B, bool), bitorder="little"))
    else:
        kind = np.int64 if pa.types.is_timestamp(type) else type.to_pandas_dtype()
        buffer = pa.py_buffer(np.ascontiguousarray(values_B, kind))
    return pa.Array.from_buffers(type, len(values_B), [_bitmap(valid_B), buffer])


def text_array(texts: Sequence[str | None]) -> pa.Array:
    known = ["" if text is None else text for text in texts]
    joined = "".join(known)
    lengths = [len(text) for text in known] if joined.isascii() else [len(text.encode()) for text in known]
    offsets = np.zeros(len(known) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    if offsets[-1] > np.iinfo(np.int32).max:
        return pa.array(texts, pa.string())  # the text needs 64-bit offsets, so let Arrow raise its error
    valid_B = None if None not in texts else np.array([text is not None for text in texts], bool)
    buffers = [_bitmap(valid_B), pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(joined.encode())]
    return pa.Array.from_buffers(pa.string(), len(known), buffers)


def column_array(values: Sequence[Any], type: pa.DataType) -> pa.Array:
    if pa.types.is_string(type):
        return text_array(values)
    if pa.types.is_timestamp(type):
        values = [None if value is None else (value - _EPOCH) // timedelta(microseconds=1) for value in values]
    known = [0 if value is None else value for value in values]
    valid_B = None if None not in values else np.array([value is not None for value in values], bool)
    return number_array(known, type, valid_B)


def float_values(array: pa.Array) -> np.ndarray:
    bitmap, values = array.buffers()
    found = np.frombuffer(values, np.float64, len(array))
    if bitmap is None:
        return found
    valid = np.unpackbits(np.frombuffer(bitmap, np.uint8), count=len(array), bitorder="little").astype(bool)
    return np.where(valid, found, np.nan)


def _bitmap(valid_B: np.ndarray | None) -> pa.Buffer | None:
    return None if valid_B is None else pa.py_buffer(np.packbits(valid_B, bitorder="little"))
