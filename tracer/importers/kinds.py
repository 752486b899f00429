"""Kinds of imported columns: which cells are valid, and how cells are converted to the trace's types.

Each kind implements its rule twice: `convert` handles a whole Arrow array, which is fast; `holds` checks one Python
value, to find the first invalid value. A test compares the two implementations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ...schemas import tables
from ...schemas.tables import Column

INT32_MAX, INT64_MAX = 2**31 - 1, 2**63 - 1


class WrongValues(Exception):
    """The values in a column are invalid; the caller determines the row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """The rule that says which cells are valid in a column and how they are converted."""

    wants: str
    """Description of valid cells, which completes the message "where each row needs ..."."""
    type: pa.DataType
    convert: Callable[[pa.Array], pa.Array]
    """Function that converts a plain Arrow array that is not all NULL to `type`. Raises WrongValues or an Arrow error."""
    holds: Callable[[Any], bool]
    """Function that returns True for a valid value; it is never called with None."""
    of: Callable[[Any], Any]
    """Function that converts one valid value to the Python type for `type`. It is used for mixtures whose type Arrow
    cannot infer."""
    nullable: bool = True
    element: Kind | None = None
    """Kind of the elements in a list; None if cells are not lists."""

    def column(self, array: pa.Array) -> pa.Array:
        """Convert an array to `type`; an all-NULL array of any type is accepted.

        Raises WrongValues or an Arrow error.
        """
        array = plain(array)
        if array.null_count and not self.nullable:
            raise WrongValues
        return pa.nulls(len(array), self.type) if array.null_count == len(array) else self.convert(array)


def required(kind: Kind) -> Kind:
    """Return a kind that is the same as `kind` but does not accept NULL."""
    return replace(kind, nullable=False)


def list_of(kind: Kind, wants: str) -> Kind:
    """Return a kind whose cells are lists with elements of the given kind."""

    def convert(array: pa.Array) -> pa.Array:
        if not pa.types.is_list(array.type):
            raise WrongValues
        values = kind.column(array.flatten())
        lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
        missing = array.is_null() if array.null_count else None
        return pa.ListArray.from_arrays(offsets, values, mask=missing)

    def holds(value: Any) -> bool:
        return isinstance(value, list) and first_wrong(value, kind) is None

    def of(value: Any) -> Any:
        return [None if item is None else kind.of(item) for item in value]

    return Kind(wants=wants, type=pa.list_(kind.type), convert=convert, holds=holds, of=of, element=kind)


def either(kind: Kind, other: Kind) -> Kind:
    """Return a kind for columns whose cells are either all valid for `kind` or all valid for `other`."""

    def convert(array: pa.Array) -> pa.Array:
        return (other if pa.types.is_list(array.type) else kind).convert(array)

    return Kind(
        wants=f"{kind.wants}, or each {other.wants}",
        type=kind.type,
        convert=convert,
        holds=lambda value: kind.holds(value) or other.holds(value),
        of=lambda value: (other if isinstance(value, list) else kind).of(value),
        element=other.element,
    )


def first_wrong(values: Sequence[Any], kind: Kind) -> int | None:
    """Return the index of the first invalid value; None if all are valid."""
    for place, value in enumerate(values):
        if not (kind.nullable if value is None else kind.holds(value)):
            return place
    return None


def plain(array: pa.Array) -> pa.Array:
    """Decode an array from dictionaries, run-end encoding, extension types and other list types to plain types."""
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


_LISTS = (
    pa.types.is_large_list,
    pa.types.is_fixed_size_list,
    pa.types.is_list_view,
    pa.types.is_large_list_view,
)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, Decimal)) and not isinstance(value, bool)


def _convert_numbers(array: pa.Array) -> pa.Array:
    """Convert numbers to float64; raises an Arrow error for an integer that float64 cannot represent."""
    if not _is_numeric(array.type):
        raise WrongValues
    return array.cast(pa.float64(), safe=pa.types.is_integer(array.type))


def _is_numeric(type: pa.DataType) -> bool:
    return any(test(type) for test in (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal))


def _holds_number(value: Any) -> bool:
    # float64 does not represent every integer beyond this limit exactly.
    return _is_number(value) and (not isinstance(value, int) or abs(value) <= 2**53)


def _convert_scores(array: pa.Array) -> pa.Array:
    """Convert numbers or booleans to float64."""
    return array.cast(pa.float64()) if pa.types.is_boolean(array.type) else _convert_numbers(array)


def _convert_values(array: pa.Array) -> pa.Array:
    """Convert numbers to float32, which frameworks use for these values. Rounding is accepted; overflow is not."""
    if pa.types.is_float32(array.type):
        return array
    wide = _convert_numbers(array)
    narrow = wide.cast(pa.float32(), safe=False)
    changed = pc.and_(pc.is_finite(wide), pc.invert(pc.is_finite(narrow)))
    if pc.any(changed).as_py():
        raise WrongValues
    return narrow


def _holds_value(value: Any) -> bool:
    if not _holds_number(value):
        return False
    number = float(value)
    with np.errstate(over="ignore"):
        return not math.isfinite(number) or bool(np.isfinite(np.float32(number)))


def _convert_flags(array: pa.Array) -> pa.Array:
    if pa.types.is_boolean(array.type):
        return array
    numbers = _convert_numbers(array)
    if not pc.all(pc.or_(pc.equal(numbers, 0.0), pc.equal(numbers, 1.0))).as_py():
        raise WrongValues
    return pc.equal(numbers, 1.0)


def _whole(type: pa.DataType, low: int, high: int) -> tuple[Callable[[pa.Array], pa.Array], Callable[[Any], bool]]:
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

    def holds(value: Any) -> bool:
        whole = isinstance(value, int) or (_is_number(value) and math.isfinite(value) and value == int(value))
        return whole and not isinstance(value, bool) and low <= int(value) <= high

    return convert, holds


def integer(wants: str, type: pa.DataType, low: int, high: int) -> Kind:
    """Return a kind for integers from `low` to `high`, which files may store as integers or floats."""
    convert, holds = _whole(type, low, high)
    return Kind(wants=wants, type=type, convert=convert, holds=holds, of=int)


def _convert_text(array: pa.Array) -> pa.Array:
    if not pa.types.is_string(array.type):
        raise WrongValues
    array.validate(full=True)  # a file may declare invalid UTF-8 as text
    return array


def _convert_names(array: pa.Array) -> pa.Array:
    return array.cast(pa.string()) if pa.types.is_integer(array.type) else _convert_text(array)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value == value.encode(errors="replace").decode()


def _is_name(value: Any) -> bool:
    return _is_text(value) or (isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**64)


NUMBER = Kind(wants="a number", type=pa.float64(), convert=_convert_numbers, holds=_holds_number, of=float)
SCORE = Kind(
    wants="a number",
    type=pa.float64(),
    convert=_convert_scores,
    holds=lambda value: isinstance(value, bool) or _holds_number(value),
    of=float,
)
"""Kind for numbers. True and False are accepted as 1 and 0, because rewards are often the result of a check."""
TEXT = Kind(wants="text", type=pa.string(), convert=_convert_text, holds=_is_text, of=str)
NAME = Kind(wants="a string or an integer", type=pa.string(), convert=_convert_names, holds=_is_name, of=str)
VALUE = Kind(wants="a number", type=pa.float32(), convert=_convert_values, holds=_holds_value, of=float)
VALUES = list_of(VALUE, "a list of numbers")
FLAGS = list_of(
    required(
        Kind(
            wants="0 or 1",
            type=pa.bool_(),
            convert=_convert_flags,
            holds=lambda value: isinstance(value, bool) or (_is_number(value) and value in (0, 1)),
            of=bool,
        )
    ),
    "a list of 0 and 1, or of false and true",
)
TOKENS = list_of(
    required(integer("a token id", pa.int32(), 0, INT32_MAX)),
    f"a list of token ids, whole numbers from 0 to {INT32_MAX}",
)
STEP = required(integer("a whole number from 0 on", pa.int64(), 0, INT64_MAX))
VERSION = integer("a whole number", pa.int64(), -INT64_MAX - 1, INT64_MAX)
COUNT = integer(f"a whole number of at most {INT32_MAX}", pa.int32(), -INT32_MAX - 1, INT32_MAX)


def _convert_rewards(array: pa.Array) -> pa.Array:
    is_map = pa.types.is_map(array.type)
    if not is_map and not pa.types.is_struct(array.type):
        raise WrongValues
    rows = [dict(row) if is_map and row is not None else row for row in array.to_pylist()]
    if first_wrong(rows, REWARDS) is not None:
        raise WrongValues
    return pa.array([None if row is None else _rewards(row) for row in rows], tables.REWARDS)


def _holds_rewards(value: Any) -> bool:
    """Return True if a value is a record of name -> number, where NULL means that the number is missing."""
    return isinstance(value, dict) and all(
        _is_text(name) and (number is None or SCORE.holds(number)) for name, number in value.items()
    )


def _rewards(value: dict[str, Any]) -> list[tuple[str, float]]:
    return [(name, float(number)) for name, number in value.items() if number is not None]


REWARDS = Kind(
    wants="a record of numbers, one per reward function",
    type=tables.REWARDS,
    convert=_convert_rewards,
    holds=_holds_rewards,
    of=_rewards,
)

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
    """Return the kind of a column of the trace."""
    kind = _OF_TYPE[column.type]
    if column.name == "step":
        kind = STEP
    elif column.is_name:
        kind = NAME
    elif column.takes_flags:
        kind = SCORE
    return kind if column.null else required(kind)
