"""Build the rows of the metrics table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from datetime import datetime
from typing import Any

import numpy as np
import pyarrow as pa

from ..schemas.errors import InvalidRecord
from ..schemas.tables import METRICS_TABLE
from .arrow_arrays import column_array
from .ragged import shown
from .scalars import text
from .staging import is_tensor, to_numpy

_SCHEMA = METRICS_TABLE.schema


def check_metrics(values: Any, what: str) -> None:
    """Raise InvalidRecord unless the metrics are a dict of name -> number, text or None."""
    if not isinstance(values, Mapping):
        raise InvalidRecord(f"{what}: got {shown(values)}; give a dict of name -> value")
    for name, value in values.items():
        if not isinstance(name, str):
            raise InvalidRecord(f"{what}: the name {shown(name)} is not a string")
        text(name, what)
        _check(value, f"{what}, {name!r}")


def _check(value: Any, what: str) -> None:
    if isinstance(value, str):
        text(value, what)
    elif isinstance(value, Mapping):
        raise InvalidRecord(f"{what}: got {shown(value)}; give each value its own name, for example 'loss/policy'")
    elif is_tensor(value) or isinstance(value, (np.ndarray, np.generic)):
        if int(np.prod(value.shape)) != 1:
            raise InvalidRecord(
                f"{what}: got values of shape {tuple(value.shape)}; give one number, such as their mean, or name each value"
            )
        if not is_tensor(value) and value.dtype.kind in "OU":
            _check(value.item(), what)
    elif isinstance(value, (Sequence, Set)):
        raise InvalidRecord(f"{what}: got {shown(value)}; give one number, such as their mean, or name each value")
    elif isinstance(value, int) and _float(value) is None:
        raise InvalidRecord(f"{what}: the number is too large for float64; give it as text")


def metric_rows(
    step: int, values: Mapping[str, Any], logged_at: datetime, attempt: int | None, writer: str
) -> pa.RecordBatch:
    """Return one row per value: numbers and one-element tensors are stored as numbers, None as NULL, anything else as
    text."""
    plain = [_plain(value) for value in values.values()]
    numbers = [_number(value) for value in plain]
    texts = [
        None if number is not None or value is None else _text(value)
        for number, value in zip(numbers, plain, strict=True)
    ]
    count = len(numbers)
    columns: list[list[Any]] = [
        [step] * count,
        [_text(name) for name in values],
        numbers,
        texts,
        [logged_at] * count,
        [attempt] * count,
        [writer] * count,
    ]
    arrays = [column_array(column, field.type) for column, field in zip(columns, _SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=_SCHEMA)


def _plain(value: Any) -> Any:
    holds_one = isinstance(value, np.ndarray) and value.dtype.kind in "OU" and value.size == 1
    return value.item() if holds_one else value


def _number(value: Any) -> float | None:
    if is_tensor(value) or isinstance(value, (np.ndarray, np.generic)):
        array = to_numpy(value)
        return float(array.item()) if array.size == 1 and array.dtype.kind in "fiub" else None
    return _float(value) if isinstance(value, (bool, int, float)) else None


def _float(value: float) -> float | None:
    try:
        return float(value)
    except OverflowError:
        return None


def _text(value: Any) -> str:
    return str(value).encode(errors="backslashreplace").decode()
