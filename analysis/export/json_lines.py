"""Rows as JSON, one object a line."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

_ROWS = 256
"""Rows that are objects of Python at once."""


def write_lines(path: Path, rows: Iterator[pa.Table | pa.RecordBatch]) -> int:
    """Write rows, and return how many. NaN and infinities are the texts NaN, Infinity and -Infinity: JSON has no numbers for them."""
    num_rows = 0
    with path.open("w", encoding="utf-8") as file:
        for part in rows:
            for start in range(0, part.num_rows, _ROWS):
                for row in part.slice(start, _ROWS).to_pylist(maps_as_pydicts="lossy"):
                    file.write(f"{_line(row)}\n")
            num_rows += part.num_rows
    return num_rows


def _line(row: dict[str, Any]) -> str:
    try:
        return json.dumps(row, ensure_ascii=False, allow_nan=False)
    except ValueError:  # a row with NaN or an infinity: few have one
        return json.dumps(_finite(row), ensure_ascii=False, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
