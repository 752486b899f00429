"""Rows of a dump on their way into the trace: cells under the trace's column names, gathered into a RowBatch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from .fields import Values
from .rowbatch import RowBatch


class DumpRows:
    """Gathers rows; a cell is a number, a text, None, an array, or Values."""

    def __init__(self, file: str, unit: str = "row"):
        self._file, self._unit = file, unit
        self._rows: list[dict[str, Any]] = []
        self._numbers: list[int] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, number: int, **cells: Any) -> None:
        """Add a row; cells that are None are not recorded. `routing` is what RowBatch has of it, and no column."""
        self._numbers.append(number)
        self._rows.append(cells)

    def batch(self) -> RowBatch:
        """The rows as columns. What is one advantage for every token of a row becomes one number, where all rows allow it."""
        names = dict.fromkeys(name for row in self._rows for name in row if name != "routing")
        columns: dict[str, Any] = {}
        for name in names:
            cells = [row.get(name) for row in self._rows]
            if name == "advantage":
                cells = _advantages(cells, [row.get("response_mask") for row in self._rows])
            if any(cell is not None for cell in cells) or name in ("prompt_ids",):
                columns[name] = _column(cells)
        routing = [row.get("routing") for row in self._rows]
        return RowBatch(
            file=self._file, columns=columns, numbers=self._numbers, unit=self._unit,
            routing=routing if any(each is not None for each in routing) else (),
        )  # fmt: skip


def _column(cells: list[Any]) -> Any:
    if not any(isinstance(cell, (np.ndarray, Values)) for cell in cells):
        return cells
    parts = [Values(cell, np.ones(len(cell), bool)) if isinstance(cell, np.ndarray) else cell for cell in cells]
    lengths = [0 if part is None else len(part) for part in parts]
    filled = [part for part in parts if part is not None and len(part)]
    values = np.concatenate([part.values for part in filled]) if filled else np.empty(0, np.int32)
    known = np.concatenate([part.known for part in filled]) if filled else np.empty(0, bool)
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    missing = pa.array([part is None for part in parts]) if any(part is None for part in parts) else None
    flat = pa.array(
        values.astype(np.float64) if values.dtype.kind == "f" else values, mask=None if known.all() else ~known
    )
    return pa.ListArray.from_arrays(offsets, flat, mask=missing)


def _advantages(cells: list[Any], masks: list[Any]) -> list[Any]:
    if not any(isinstance(cell, (np.ndarray, Values)) for cell in cells):
        return cells
    found: list[Any] = []
    for cell, mask in zip(cells, masks, strict=True):
        if not isinstance(cell, (np.ndarray, Values)):
            found.append(cell)
            continue
        part = cell if isinstance(cell, Values) else Values(cell, np.ones(len(cell), bool))
        counted = part.known if mask is None else part.known & mask
        values = part.values[counted]
        if len(values) and (values != values[0]).any():
            return cells
        found.append(float(values[0]) if len(values) else None)
    return found
