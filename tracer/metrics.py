"""Building rows of metrics."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import numpy as np
import pyarrow as pa

from ..schemas.tables import METRICS_TABLE
from .staging import is_tensor, to_numpy

_SCHEMA = METRICS_TABLE.schema


def metric_rows(
    step: int, values: Mapping[str, Any], logged_at: datetime, attempt: int | None, writer: str
) -> pa.RecordBatch:
    """One row a value: numbers (tensors of one element too) as numbers, anything else as text."""
    numbers = [_number(value) for value in values.values()]
    texts = [None if number is not None else str(v) for number, v in zip(numbers, values.values(), strict=True)]
    count = len(numbers)
    columns = [[step] * count, list(values), numbers, texts, [logged_at] * count, [attempt] * count, [writer] * count]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, _SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=_SCHEMA)


def _number(value: Any) -> float | None:
    """The value as a number, or None when it is not one."""
    if is_tensor(value) or isinstance(value, (np.ndarray, np.generic)):
        array = to_numpy(value)
        return float(array) if array.size == 1 and array.dtype.kind in "fiub" else None
    return float(value) if isinstance(value, (bool, int, float)) else None
