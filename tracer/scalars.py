from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from numbers import Integral, Real
from types import NoneType
from typing import Any

import numpy as np
import pyarrow as pa

from ..schemas.errors import InvalidRecord
from .arrow_arrays import column_array, number_array
from .ragged import shown
from .staging import is_tensor, to_numpy

_INT64_MAX = 2**63 - 1


def step_number(value: Any, what: str = "step") -> int:
    """Return a step as an int. Accepts non-negative Python, NumPy and torch integers.

    >>> step_number(np.int64(3))
    3
    """
    whole = value.item() if _is_array(value) and value.shape == () else value
    if not isinstance(whole, Integral) or isinstance(whole, (bool, np.bool_)) or not 0 <= int(whole) <= _INT64_MAX:
        raise InvalidRecord(f"{what}: got {shown(value)}; pass a non-negative integer")
    return int(whole)


def as_text(value: Any) -> str:
    """Return a value as text that can be encoded as UTF-8. Lone surrogates are escaped."""
    return str(value).encode(errors="backslashreplace").decode()


def per_row(value: Any, rows: int, type: pa.DataType, what: str, *, flags: bool = False) -> Any:
    """Return a column's values: one Python value for all rows, an Arrow array [B], or None if not recorded."""
    if value is None:
        return None
    if isinstance(value, pa.Array) and value.type == type and len(value) == rows and not pa.types.is_string(type):
        return value.take(pa.array(range(rows), pa.int64())) if value.offset else value
    if isinstance(value, (str, bytes, Real)) or (_is_array(value) and value.shape == ()):
        return _one(value, type, what, flags)
    values = listed(value, rows, what)
    if isinstance(values, np.ndarray) and values.dtype.kind == "f" and pa.types.is_floating(type):
        return number_array(values.astype(np.float64), type)
    if isinstance(values, list) and _is_of_column(values, type):
        return column_array(values, type)
    return column_array([_one(item, type, f"{what}: row {row}", flags) for row, item in enumerate(values)], type)


def _is_of_column(values: list[Any], column: pa.DataType) -> bool:
    kinds = set(map(type, values)) - {NoneType}
    if pa.types.is_string(column):
        return kinds <= {str} and "".join(filter(None, values)).isascii()
    if pa.types.is_integer(column):
        bound = 2 ** (column.bit_width - 1)
        return kinds <= {int} and all(-bound <= value < bound for value in values if value is not None)
    return pa.types.is_floating(column) and kinds <= {float}


def listed(value: Any, rows: int, what: str) -> np.ndarray | list[Any]:
    give = f"pass one value, or one for each of the {rows} sequences"
    if is_tensor(value) or hasattr(value, "__array__"):
        values = _array(value, what)
        if values.shape != (rows,):
            raise InvalidRecord(f"{what}: got shape {values.shape}; {give}")
        return values
    if not isinstance(value, Sequence):
        raise InvalidRecord(f"{what}: got {shown(value)}; {give}")
    if len(value) != rows:
        raise InvalidRecord(f"{what}: got {len(value)} values for {rows} sequences; pass one per sequence")
    return list(value)


def names(values: Any, what: str, *, optional: bool = False) -> list[Any]:
    if is_tensor(values) or hasattr(values, "__array__"):
        values = _array(values, what).tolist()
    if isinstance(values, (Mapping, Set)) or not hasattr(values, "__iter__"):
        raise InvalidRecord(f"{what}: got {shown(values)}; pass a list of strings or integers")
    if type(values) is list and set(map(type, values)) == {str} and "".join(values).isascii():
        return list(values)
    return [_name(value, f"{what}: row {row}", optional) for row, value in enumerate(values)]


def text(value: str, what: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidRecord(f"{what}: {value!r:.60} cannot be encoded as UTF-8 ({error.reason})") from error
    return str(value)


def _name(value: Any, what: str, optional: bool) -> str | None:
    if isinstance(value, str):
        return text(value, what)
    if _is_array(value) and value.shape == ():
        value = value.item()
    if isinstance(value, Integral) and not isinstance(value, bool):
        return str(int(value))
    if value is None and optional:
        return None
    raise InvalidRecord(f"{what} is {shown(value)}; pass a string or an integer{', or None' if optional else ''}")


def _one(value: Any, type: pa.DataType, what: str, flags: bool) -> Any:
    if _is_array(value) and value.shape == ():
        value = _array(value, what).item()
    if value is None:
        return None
    if pa.types.is_string(type):
        if isinstance(value, str):
            return text(value, what)
    elif isinstance(value, Real) and (flags or not isinstance(value, (bool, np.bool_))):
        found = _as_int(value, type) if pa.types.is_integer(type) else as_float(value)
        if found is not None:
            return found
    raise InvalidRecord(f"{what}: got {shown(value)}; pass {_WANTED[str(type)]}")


_WANTED = {
    "string": "text",
    "double": "a number",
    "int32": f"an integer of at most {2**31 - 1}",
    "int64": f"an integer of at most {_INT64_MAX}",
}


def _as_int(value: Any, type: pa.DataType) -> int | None:
    number = as_float(value)
    if not isinstance(value, Integral) and (number is None or not number.is_integer()):
        return None
    bound = 2 ** (type.bit_width - 1)
    return int(value) if -bound <= int(value) < bound else None


def as_float(value: Any) -> float | None:
    try:
        return float(value)
    except OverflowError:
        return None


def _is_array(value: Any) -> bool:
    return is_tensor(value) or isinstance(value, (np.ndarray, np.generic))


def _array(value: Any, what: str) -> np.ndarray:
    try:
        return to_numpy(value.cpu() if is_tensor(value) else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidRecord(f"{what}: {shown(value)} cannot be read ({str(error).splitlines()[0]})") from error


def check_metrics(values: Any, what: str) -> None:
    if not isinstance(values, Mapping):
        raise InvalidRecord(f"{what}: got {shown(values)}; pass a dict of values by name")
    for name, value in values.items():
        if not isinstance(name, str):
            raise InvalidRecord(f"{what}: the name {shown(name)} is not a string")
        text(name, what)
        _check_metric(value, f"{what}, {name!r}")


def _check_metric(value: Any, what: str) -> None:
    if isinstance(value, str):
        text(value, what)
    elif isinstance(value, Mapping):
        raise InvalidRecord(f"{what}: got {shown(value)}; give each value its own name, for example 'loss/policy'")
    elif _is_array(value):
        if int(np.prod(value.shape)) != 1:
            raise InvalidRecord(
                f"{what}: got values of shape {tuple(value.shape)}; pass one number, such as their "
                "mean, or give each value its own name"
            )
        if not is_tensor(value) and value.dtype.kind in "OU":
            _check_metric(value.item(), what)
    elif isinstance(value, (Sequence, Set)):
        raise InvalidRecord(
            f"{what}: got {shown(value)}; pass one number, such as the mean of the values, or "
            "give each value its own name"
        )
    elif isinstance(value, int) and as_float(value) is None:
        raise InvalidRecord(f"{what}: the number is too large for float64. Pass it as text")
