"""Collect a dump's rows as columns.

Shapes: B rows, N tokens across all rows, T padded row width, L layers with a router, S experts selected per token.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from ...schemas.errors import ImportFailed
from ..ragged import Padding
from ..routing import NOT_ROUTED
from .arrays import settled
from .columns import RowBatch
from .fields import Fields, Values

_MOST_EXPERTS = np.iinfo(np.int16).max
_WEIGHTED = ("advantage", "response_mask")


class DumpRows:
    """Rows collected one by one. Cells are numbers, strings, None, arrays, Values or (for rewards) dicts of numbers."""

    def __init__(self, file: str, unit: str = "row"):
        self._file, self._unit = file, unit
        self._rows: list[dict[str, Any]] = []
        self._numbers: list[int] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, number: int, **cells: Any) -> None:
        cells.setdefault("prompt_ids", None)
        if cells.get("response_ids") is None:
            cells["response_ids"] = np.empty(0, np.int32)
        self._numbers.append(number)
        self._rows.append(cells)

    def batch(self) -> RowBatch:
        columns: dict[str, Any] = {}
        for name in dict.fromkeys(name for row in self._rows for name in row):
            cells = [row.get(name) for row in self._rows]
            if name == "advantage":
                cells = _advantages(cells, [row.get("response_mask") for row in self._rows])
            if any(cell is not None for cell in cells) or name == "prompt_ids":
                columns[name] = _column(cells, self._file)
        return RowBatch(file=self._file, columns=columns, numbers=self._numbers, unit=self._unit)


def _column(cells: list[Any], where: str) -> Any:
    if not any(isinstance(cell, (np.ndarray, Values)) for cell in cells):
        return cells
    lengths = np.array([0 if cell is None else len(cell) for cell in cells], np.int64)
    all_known = np.ones(lengths.max(), bool)
    parts = [Values(cell, all_known[: len(cell)]) if isinstance(cell, np.ndarray) else cell for cell in cells]
    filled = [part for part in parts if part is not None and len(part)]
    if any(part.values.shape[1:] != filled[0].values.shape[1:] for part in filled):
        raise ImportFailed(f"{where}: the number of router layers or slots differs between rows")
    values, known = (
        map(np.concatenate, zip(*filled, strict=True)) if filled else (np.empty(0, np.int32), np.empty(0, bool))
    )
    missing = np.array([cell is None for cell in cells])
    return list_column(values, lengths, known, missing if missing.any() else None)


def list_column(
    values_N: np.ndarray, lengths_B: np.ndarray, known_N: np.ndarray | None = None, missing_B: np.ndarray | None = None
) -> pa.ListArray:
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths_B)]).astype(np.int32))
    if values_N.dtype.kind == "f" and values_N.dtype != np.float32:
        values_N = values_N.astype(np.float64)
    flat = pa.array(values_N.reshape(-1), mask=None if known_N is None or known_N.all() else ~known_N)
    for size in reversed(values_N.shape[1:]):
        flat = pa.FixedSizeListArray.from_arrays(flat, size)
    return pa.ListArray.from_arrays(offsets, flat, mask=None if missing_B is None else pa.array(missing_B))


def masked_row(tokens: np.ndarray, mask: np.ndarray, values: Mapping[str, Values | None]) -> dict[str, Any]:
    """Return a sequence's cells. The response begins at the first token in the mask."""
    first = int(mask.argmax())
    return {
        "prompt_ids": tokens[:first],
        "response_ids": tokens[first:],
        "response_mask": mask[first:],
        **{name: _of_response(each, first) for name, each in values.items()},
    }


def _of_response(values: Values | None, first: int) -> Values | None:
    """Return the values of the response. A sequence's first token has no context and therefore no value."""
    if values is None or not values.known[first:].any():
        return None
    known = values.known[first:].copy()
    known[0] &= first > 0
    return Values(values.values[first:], known)


def padded_columns(
    step: int | None, prompts: np.ndarray | None, prompted: Padding, responses: np.ndarray, responded: Padding,
    per_token: Mapping[str, np.ndarray],
) -> dict[str, Any]:  # fmt: skip
    """Convert a padded batch to columns. Responses and per-token values have shape [B, T]."""
    num_rows = len(responses)
    flat = {name: responded.flatten(values) for name, values in per_token.items()}
    if "response_mask" in flat:
        flat["response_mask"] = flat["response_mask"].astype(bool)
    columns: dict[str, Any] = {
        "step": [step] * num_rows,
        "seq_id": [str(row) for row in range(num_rows)],
        "prompt_ids": [None] * num_rows
        if prompts is None
        else list_column(prompted.flatten(prompts), prompted.lengths),
        "response_ids": list_column(responded.flatten(responses), responded.lengths),
        **{name: list_column(values, responded.lengths) for name, values in flat.items()},
    }
    if "advantage" in flat:
        ends = np.cumsum(responded.lengths)
        rows = (np.split(flat[name], ends)[:-1] if name in flat else [None] * num_rows for name in _WEIGHTED)
        columns["advantage"] = _column(_advantages(*rows), "advantage")
    return columns


def added_columns(fields: Fields, num_rows: int, own: Collection[str]) -> dict[str, Any]:
    """Return the columns that `map` adds to a padded batch, except those in `own`, with one value per row."""
    found = {name: settled(fields.get(name)) for name in fields.added if name not in own}
    found = {name: values for name, values in found.items() if values is not None}
    for name, values in found.items():
        if np.ndim(values) == 0 or len(values) != num_rows:
            raise ImportFailed(f"{fields.where}: the field mapped to {name} must have {num_rows} values, one per row")
    return {name: values if isinstance(values, list) else values.tolist() for name, values in found.items()}


def _advantages(cells: list[Any], masks: list[Any]) -> list[Any]:
    """Return one advantage per row if each row's advantage is constant over its loss mask, else `cells`."""
    found: list[Any] = []
    for cell, mask in zip(cells, masks, strict=True):
        if isinstance(cell, np.ndarray):
            cell = Values(cell, np.ones(len(cell), bool))
        if isinstance(cell, Values):
            values = cell.values[cell.known if mask is None else cell.known & mask]
            if len(values) and (values != values[0]).any():
                return cells
            cell = float(values[0]) if len(values) else None
        found.append(cell)
    return found


def routed(found: np.ndarray, num_tokens: int, where: str) -> np.ndarray:
    """Pad router choices [N, L, S] to [num_tokens, L, S] int16, with -1 for tokens that were not routed."""
    if found.dtype.kind not in "iu" or (found.size and not NOT_ROUTED <= found.min() <= found.max() <= _MOST_EXPERTS):
        raise ImportFailed(f"{where}: router choices must be integers from -1 to {_MOST_EXPERTS}, got {found.dtype}")
    ids = np.full((num_tokens, *found.shape[1:]), NOT_ROUTED, np.int16)
    ids[: len(found)] = found
    # A router never selects an expert twice for a token, so a token whose choices are all equal is padding.
    if found.shape[2] > 1:
        ids[(ids == ids[:, :, :1]).all(axis=(1, 2))] = NOT_ROUTED
    return ids
