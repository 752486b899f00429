from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ...schemas import tables
from ...schemas.tables import Column

INT32_MAX, INT64_MAX = 2**31 - 1, 2**63 - 1


class WrongValues(Exception):
    """A column contains an invalid value. The caller catches this error and finds the row."""


WRONG = (WrongValues, pa.ArrowException, OverflowError, UnicodeError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    wants: str
    """Completes the message "each row needs ..."."""
    type: pa.DataType
    convert: Callable[[pa.Array], pa.Array]
    """Converts a plain Arrow array that is not all NULL to `type`. Raises WrongValues or an Arrow error."""
    nullable: bool = True
    element: Kind | None = None

    def column(self, array: pa.Array) -> pa.Array:
        """Convert a column's array. An all-NULL array may have any type. Raises WrongValues or an Arrow error."""
        array = plain(array)
        if array.null_count and not self.nullable:
            raise WrongValues
        return pa.nulls(len(array), self.type) if array.null_count == len(array) else self.convert(array)

    def one(self, value: Any) -> pa.Array:
        """Convert one Python value to an array with one element. Unlike in Arrow, a list may mix types."""
        try:
            return self.column(pa.array([value]))
        except WRONG:
            if self.element is None or not isinstance(value, list):
                raise
        items = pa.concat_arrays([self.element.one(item) for item in value])
        return pa.ListArray.from_arrays(pa.array([0, len(items)], pa.int32()), items)


def required(kind: Kind) -> Kind:
    return replace(kind, nullable=False)


def list_of(kind: Kind, wants: str) -> Kind:
    def convert(array: pa.Array) -> pa.Array:
        if not pa.types.is_list(array.type):
            raise WrongValues
        values = kind.column(array.flatten())
        lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
        return pa.ListArray.from_arrays(offsets, values, mask=array.is_null() if array.null_count else None)

    return Kind(wants=wants, type=pa.list_(kind.type), convert=convert, element=kind)


def either(kind: Kind, other: Kind, test: Callable[[pa.DataType], bool], wants: str) -> Kind:
    """Return a kind that converts like `other` if an array's type passes `test`, else like `kind`."""

    def convert(array: pa.Array) -> pa.Array:
        return (other if test(array.type) else kind).convert(array)

    return replace(kind, wants=wants, convert=convert, element=other.element)


def first_wrong(values: Sequence[Any], kind: Kind) -> int | None:
    for place, value in enumerate(values):
        try:
            kind.one(value)
        except WRONG:
            return place
    return None


def plain(array: pa.Array) -> pa.Array:
    """Decode dictionaries and run-end encoding, and convert extension, list and string types to their basic forms."""
    if isinstance(array.type, pa.BaseExtensionType):
        return plain(array.storage)
    if pa.types.is_dictionary(array.type):
        return plain(array.dictionary_decode())
    if pa.types.is_run_end_encoded(array.type):
        return plain(pc.run_end_decode(array))
    if any(test(array.type) for test in _LISTS):
        return array.cast(pa.list_(array.type.value_type))
    if pa.types.is_large_string(array.type) or pa.types.is_string_view(array.type):
        return array.cast(pa.string())
    return array


_LISTS = (pa.types.is_large_list, pa.types.is_fixed_size_list, pa.types.is_list_view, pa.types.is_large_list_view)


def _convert_numbers(array: pa.Array) -> pa.Array:
    """Convert to float64. Raises an Arrow error for an integer that float64 cannot represent exactly."""
    if not _is_numeric(array.type):
        raise WrongValues
    return array.cast(pa.float64(), safe=pa.types.is_integer(array.type))


def _is_numeric(type: pa.DataType) -> bool:
    return any(test(type) for test in (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal))


def _convert_values(array: pa.Array) -> pa.Array:
    """Convert to float32, which frameworks use for these values. Values may be rounded but must not overflow."""
    if pa.types.is_float32(array.type):
        return array
    wide = _convert_numbers(array)
    narrow = wide.cast(pa.float32(), safe=False)
    if pc.any(pc.and_(pc.is_finite(wide), pc.invert(pc.is_finite(narrow)))).as_py():
        raise WrongValues
    return narrow


def _convert_flags(array: pa.Array) -> pa.Array:
    if pa.types.is_boolean(array.type):
        return array
    numbers = _convert_numbers(array)
    if not pc.all(pc.or_(pc.equal(numbers, 0.0), pc.equal(numbers, 1.0))).as_py():
        raise WrongValues
    return pc.equal(numbers, 1.0)


def integer(wants: str, type: pa.DataType, low: int, high: int) -> Kind:
    def convert(array: pa.Array) -> pa.Array:
        if not _is_numeric(array.type):
            raise WrongValues
        if pa.types.is_float16(array.type):
            array = array.cast(pa.float32())
        whole = array if array.type == type else array.cast(pa.int64())
        bounds = pc.min_max(whole)
        if bounds["min"].is_valid and not low <= bounds["min"].as_py() <= bounds["max"].as_py() <= high:
            raise WrongValues
        return whole.cast(type)

    return Kind(wants=wants, type=type, convert=convert)


def _convert_text(array: pa.Array) -> pa.Array:
    if not pa.types.is_string(array.type):
        raise WrongValues
    array.validate(full=True)  # a file may contain invalid UTF-8 in a column of type string
    return array


NUMBER = Kind(wants="a number", type=pa.float64(), convert=_convert_numbers)
_FLAG = Kind(wants="True or False", type=pa.float64(), convert=lambda array: array.cast(pa.float64()))
SCORE = either(NUMBER, _FLAG, pa.types.is_boolean, "a number")
"""Accepts True and False as 1 and 0, because a reward is often a pass/fail check."""
TEXT = Kind(wants="text", type=pa.string(), convert=_convert_text)
LOGGED = either(SCORE, TEXT, pa.types.is_string, "a number or text")
_INTEGER = Kind(wants="an integer", type=pa.string(), convert=lambda array: array.cast(pa.string()))
NAME = either(TEXT, _INTEGER, pa.types.is_integer, "a string or an integer")
VALUE = Kind(wants="a number", type=pa.float32(), convert=_convert_values)
VALUES = list_of(VALUE, "a list of numbers")
FLAGS = list_of(
    required(Kind(wants="0 or 1", type=pa.bool_(), convert=_convert_flags)), "a list of 0s and 1s, or of booleans"
)
TOKEN = integer("a token id", pa.int32(), 0, INT32_MAX)
TOKENS = list_of(required(TOKEN), f"a list of token ids (0 to {INT32_MAX})")
STEP = required(integer("a non-negative integer", pa.int64(), 0, INT64_MAX))
VERSION = integer("a whole number", pa.int64(), -INT64_MAX - 1, INT64_MAX)
COUNT = integer(f"a whole number up to {INT32_MAX}", pa.int32(), -INT32_MAX - 1, INT32_MAX)


def _convert_rewards(array: pa.Array) -> pa.Array:
    is_map = pa.types.is_map(array.type)
    if not is_map and not pa.types.is_struct(array.type):
        raise WrongValues
    rows = [dict(row) if is_map and row is not None else row for row in array.to_pylist()]
    numbers = [number for row in rows for number in (row or {}).values()]
    if first_wrong(numbers, SCORE) is not None:
        raise WrongValues
    filled = [row and [(name, float(number)) for name, number in row.items() if number is not None] for row in rows]
    return pa.array(filled, tables.REWARDS)


REWARDS = Kind(wants="a record with one number per reward function", type=tables.REWARDS, convert=_convert_rewards)


def array_kind(type: pa.DataType, shape: str) -> Kind:
    """Return the kind for nested lists without NULL (see tables.ARRAYS). `shape` is their shape, for error messages."""
    if type in _CELLS:
        return replace(_CELLS[type], wants=f"{_CELLS[type].wants.partition(' ')[2]}s {shape}, without NULL")
    inner = array_kind(type.value_type, shape)
    return list_of(required(inner), inner.wants)


_CELLS = {pa.int16(): integer("an expert id", pa.int16(), -1, 2**15 - 1), pa.int32(): TOKEN, pa.float32(): VALUE}
_OF_TYPE = {
    pa.float64(): NUMBER,
    pa.int32(): COUNT,
    pa.int64(): VERSION,
    pa.string(): TEXT,
    tables.TOKENS: TOKENS,
    tables.FLOATS: VALUES,
    tables.FLAGS: FLAGS,
    tables.REWARDS: REWARDS,
}


def kind_of(column: Column) -> Kind:
    kind = _OF_TYPE[column.type]
    if column.name == "step":
        kind = STEP
    elif column.is_name:
        kind = NAME
    elif column.takes_flags:
        kind = SCORE
    return kind if column.null else required(kind)
