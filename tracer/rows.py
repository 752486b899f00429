"""Build a trace's rows: check and flatten values, then assemble Arrow batches.

Shapes: B rows, T padded width, N tokens in all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
import pyarrow as pa

from ..schemas.errors import InvalidRecord
from ..schemas.tables import TABLES
from .arrow_arrays import column_array, float_values, number_array, text_array
from .ragged import Padding, Ragged, flatten
from .scalars import as_float, as_text, per_row
from .staging import is_tensor, to_numpy

ROUNDING_NATS = {"bfloat16": 0.125, "float16": 2.0**-6}
"""Largest positive logprob (nats) that rounding can produce, by dtype: one ulp for values between 16 and 32."""
FLOAT32_ROUNDING_NATS = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """Positions of rows in forward passes. Each field has one integer per row, [B]."""

    ids: np.ndarray
    """Forward pass id. Rows in the same forward pass share it."""
    places: np.ndarray
    """Index of each row within its forward pass, from 0."""
    rows: np.ndarray
    """Number of rows in each row's forward pass."""
    pad_left: np.ndarray
    """Padding tokens before each row's prompt."""
    pad_right: np.ndarray
    """Padding tokens after each row's response."""

    def check(self, rows: int, what: str) -> None:
        for name in ("ids", "places", "rows", "pad_left", "pad_right"):
            values = np.asarray(getattr(self, name))
            if values.shape != (rows,) or values.dtype.kind not in "iu":
                raise InvalidRecord(
                    f"{what}: {name} has shape {values.shape} and dtype {values.dtype.name}. Pass one integer for each "
                    f"of the {rows} rows"
                )

    @property
    def columns(self) -> dict[str, np.ndarray]:
        padding = {"pad_left": self.pad_left, "pad_right": self.pad_right}
        return {"forward_id": self.ids, "forward_row": self.places, "forward_rows": self.rows} | padding


class RowBuilder:
    def __init__(self, schema: pa.Schema):
        self.schema = schema
        self._repeated: dict[tuple[str, Any, int], pa.Array] = {}

    def batch(self, columns: Mapping[str, Any], rows: int) -> pa.RecordBatch:
        arrays = [self._column(field.name, field.type, columns.get(field.name), rows) for field in self.schema]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _column(self, name: str, type: pa.DataType, value: Any, rows: int) -> pa.Array:
        if isinstance(value, pa.Array):
            return value
        if isinstance(value, Ragged):
            return value.to_arrow(type)
        if isinstance(value, Mapping):
            return _reward_maps(value, rows)
        if isinstance(value, (list, tuple)):
            return column_array(value, type)
        if is_tensor(value) or isinstance(value, np.ndarray):
            return number_array(to_numpy(value), type)
        key = (name, value, rows)
        if key not in self._repeated:
            if len(self._repeated) > 512:
                self._repeated.clear()
            self._repeated[key] = pa.nulls(rows, type) if value is None else column_array([value] * rows, type)
        return self._repeated[key]


BUILDERS = {name: RowBuilder(table.schema) for name, table in TABLES.items()}


def metric_columns(step: int, values: Mapping[str, Any], logged_at: datetime) -> dict[str, Any]:
    numbers, texts = [], []
    for value in values.values():
        if isinstance(value, np.ndarray) and value.dtype.kind in "OU" and value.size == 1:
            value = value.item()
        numbers.append(_number(value))
        texts.append(None if numbers[-1] is not None or value is None else as_text(value))
    return {"step": step, "name": list(map(as_text, values)), "value": numbers, "text": texts, "logged_at": logged_at}


def _number(value: Any) -> float | None:
    if is_tensor(value) or isinstance(value, (np.ndarray, np.generic)):
        array = to_numpy(value)
        return float(array.item()) if array.size == 1 and array.dtype.kind in "fiub" else None
    return as_float(value) if isinstance(value, (bool, int, float)) else None


def reward_array(value: Any, rows: int, what: str) -> np.ndarray:
    found = per_row(value, rows, pa.float64(), what, flags=True)
    if isinstance(found, pa.Array):
        return float_values(found)
    return np.full(rows, np.nan if found is None else found)


def _reward_maps(rewards: Mapping[str, np.ndarray], rows: int) -> pa.Array:
    names = list(rewards)
    keys = text_array(names * rows)
    values = number_array(np.stack([rewards[name] for name in names], axis=1).reshape(-1), pa.float64())
    offsets = number_array(np.arange(rows + 1) * len(names), pa.int32())
    return pa.MapArray.from_arrays(offsets, keys, values)


Label = Callable[[int], str]
"""Function that takes a row's index and returns the row's name for messages."""

ALIGN = "pass one value per token, or an attention mask for these values"


def aligned(
    data: Any, dtype: Any, padding: Padding | None, lengths: np.ndarray, label: Label, step: int,
    what: str, remedy: str = ALIGN, of: str = "response tokens",
) -> Ragged:  # fmt: skip
    ragged = flatten(data, dtype, padding, f"step {step}, {what}")
    if len(ragged) != len(lengths):
        raise InvalidRecord(
            f"step {step}, {what}: got {len(ragged)} rows for {len(lengths)} sequences; pass one per sequence"
        )
    wrong = np.flatnonzero(ragged.lengths != lengths)
    if len(wrong):
        row, more = int(wrong[0]), "" if len(wrong) == 1 else f" ({len(wrong) - 1} more sequences differ)"
        raise InvalidRecord(
            f"step {step}, {label(row)}: got {ragged.lengths[row]} values of {what} for {lengths[row]} "
            f"{of}{more}; {remedy}"
        )
    return ragged


def check_logprobs(logprobs: Ragged, tolerance: float, label: Label, step: int, pass_name: str) -> None:
    too_high = logprobs.values > tolerance
    if logprobs.valid is not None:
        too_high &= logprobs.valid
    if not too_high.any():
        return
    token = int(np.flatnonzero(too_high)[0])
    row = int(np.searchsorted(logprobs.offsets, token, side="right")) - 1
    raise InvalidRecord(
        f"step {step}, {label(row)}: pass {pass_name!r} has logprob {logprobs.values[token]} at response "
        f"token {token - int(logprobs.offsets[row])}. A log-probability is at most 0. Pass log-probabilities (natural "
        "log), not probabilities or logits"
    )


def rounding_tolerance(data: Any) -> float:
    """Return the largest positive logprob (nats) that rounding to the dtype of `data` can produce."""
    if isinstance(data, (list, tuple)) and len(data):
        data = data[0]
    return ROUNDING_NATS.get(str(getattr(data, "dtype", "")).removeprefix("torch."), FLOAT32_ROUNDING_NATS)


def check_whole(logprobs: Any, what: str) -> None:
    """Raise InvalidRecord for logprobs of an integer dtype, because they must have been rounded."""
    first = next(iter(logprobs), None) if isinstance(logprobs, (list, tuple)) else logprobs
    name = str(getattr(first, "dtype", "")).removeprefix("torch.")
    if "int" in name or name == "bool":
        raise InvalidRecord(f"{what}: got {name}; pass log-probabilities as floats, not rounded to integers")


def is_per_token(advantage: Any) -> bool:
    if isinstance(advantage, Ragged):
        return True
    if hasattr(advantage, "ndim"):
        return int(advantage.ndim) == 2
    if not isinstance(advantage, (list, tuple)):
        return False
    first: Any = next((row for row in advantage if row is not None), None)
    return int(first.ndim) > 0 if hasattr(first, "ndim") else isinstance(first, (list, tuple))


def of_rows(value: Any, rows: np.ndarray, count: int) -> Any:
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) == count:
        return [value[row] for row in rows]
    if hasattr(value, "shape") and len(value.shape) == 1 and value.shape[0] == count:
        return value[rows.tolist()] if is_tensor(value) else value[rows]
    return value


def with_holes(values: Ragged | None, scored: Ragged | None) -> Ragged | None:
    if values is None or scored is None or scored.values.all():
        return values
    valid = scored.values if values.valid is None else values.valid & scored.values
    return Ragged(values.values, values.lengths, valid)
