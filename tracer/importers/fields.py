from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from ...schemas import tables
from ...schemas.errors import ImportFailed
from ..scalars import as_float
from .arrays import settled
from .pickles import Budget, Foreign

PER_TOKEN = ("rollout_logprobs", "train_logprobs", "reference_logprobs", "entropy", "advantage")
"""Columns for which dumps have one value per token."""


class Values(NamedTuple):
    """Per-token numbers, and a bool mask that is True where a number was recorded."""

    values: np.ndarray
    known: np.ndarray

    def __getitem__(self, part: Any) -> Values:  # type: ignore[override]
        return Values(self.values[part], self.known[part])

    def __len__(self) -> int:
        return len(self.values)


class Fields:
    """A record's fields, looked up by trace column. Missing fields are None, and invalid fields raise ImportFailed."""

    def __init__(
        self, record: Mapping[Any, Any], columns: Mapping[str, tuple[str, ...]], where: str, seen: set[str],
        budget: Budget, added: tuple[str, ...] = (),
    ):  # fmt: skip
        if not isinstance(record, Mapping):
            raise ImportFailed(f"{where} is not a record with named fields. Check the file's format")
        self.record = record
        self._columns, self.where, self._seen, self.budget = columns, where, seen, budget
        self.added_per_token = tuple(column for column in added if _reader(column) == Fields.values)
        self.added = tuple(column for column in added if column not in self.added_per_token)
        """Columns that `map` reads from other fields."""

    def of(self, record: Mapping[Any, Any], where: str, **columns: str) -> Fields:
        further = {name: (name_there,) for name, name_there in columns.items()}
        added = self.added + self.added_per_token
        return Fields(record, {**self._columns, **further}, where, self._seen, self.budget, added)

    def get(self, column: str) -> Any:
        return self._found(column)[1]

    def _found(self, column: str) -> tuple[str, Any]:
        names = self._columns.get(column, ())
        for name in names:
            value = self.record.get(name)
            if isinstance(value, Foreign):
                raise ImportFailed(
                    f"{self.where}: field {name!r}, needed for {column}, is {shown(value)}. Save the field as a "
                    f"number, text or a list, or leave it out with --map {name}="
                )
            if value is not None:
                self._seen.add(name)
                return name, value
            if name in self.record:
                self._seen.add(name)
        return (names[0] if names else column), None

    def _refuse(self, name: str, value: Any, wants: str) -> ImportFailed:
        return ImportFailed(f"{self.where}: field {name!r} is {shown(value)}, expected {wants}")

    def required(self, column: str) -> Any:
        name, value = self._found(column)
        if value is None:
            raise ImportFailed(f"{self.where}: field {name!r}, needed for {column}, is missing")
        return value

    def cells(self, *columns: str) -> dict[str, Any]:
        return {name: reader(self, name) for name in columns or self._columns if (reader := _reader(name)) is not None}

    def added_cells(self, own: Collection[str]) -> dict[str, Any]:
        """Return the cells of the columns that `map` adds, except those in `own`, which the format fills in itself."""
        names = [name for name in self.added + self.added_per_token if name not in own]
        return self.cells(*names) if names else {}

    def array(self, column: str, dimensions: int) -> np.ndarray | None:
        name, value = self._found(column)
        return None if value is None else self._array(name, value, dimensions)

    def _array(self, name: str, value: Any, dimensions: int) -> np.ndarray:
        try:
            found = settled(value)
        except ValueError as error:
            raise ImportFailed(f"{self.where}: field {name!r} cannot be read ({error})") from error
        if isinstance(found, (list, tuple)) and dimensions == 1:
            found = self._flat(name, found)[0]
        if not isinstance(found, np.ndarray) or found.ndim != dimensions or found.dtype.kind not in "biuf":
            wants = f"a numeric array with {dimensions} dimension{'s' * (dimensions > 1)}"
            raise self._refuse(name, found, wants)
        return found

    def values(self, column: str) -> Values | None:
        """Return per-token numbers. A None in the list marks a number that was not recorded."""
        name, value = self._found(column)
        if value is None:
            return None
        if isinstance(value, (list, tuple)):
            return Values(*self._flat(name, value))
        found = self._array(name, value, 1)
        self.budget.take(found.nbytes)
        return Values(found, np.ones(len(found), bool))

    def ids(self, column: str) -> np.ndarray | None:
        if (found := self.values(column)) is None:
            return None
        with np.errstate(invalid="ignore"):
            ids = found.values.astype(np.int32)
        if found.values.dtype == bool or not found.known.all() or not ((ids == found.values) & (ids >= 0)).all():
            raise self._refuse(self._found(column)[0], self.get(column), "a list of token ids")
        return ids

    def flags(self, column: str) -> np.ndarray | None:
        if (found := self.values(column)) is None:
            return None
        values = found.values
        if not found.known.all() or (values.dtype != bool and not ((values == 0) | (values == 1)).all()):
            raise self._refuse(self._found(column)[0], self.get(column), "a list with only 0 and 1")
        return found.values.astype(bool)

    def number(self, column: str) -> float | None:
        """Return a number. Arrays with a single element are accepted too."""
        name, value = self._found(column)
        if value is None:
            return None
        value = _one(value)
        number = as_float(value) if isinstance(value, (int, float)) else None
        if number is None:
            raise self._refuse(name, value, "a number")
        return number

    def integer(self, column: str) -> int | None:
        """Return an integer. Floats without a fraction and strings of digits are accepted too."""
        name, value = self._found(column)
        if value is None:
            return None
        value = _one(value)
        if isinstance(value, str) and value.strip().lstrip("-").isdigit() and len(value) < 20:
            value = int(value)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= 2**63:
            raise self._refuse(name, value, "a whole number")
        return value

    def numbers(self, but: Collection[str]) -> dict[str, float]:
        """Return the field mapped to `rewards`. If there is none, return all numeric fields, except those used by a
        column or listed in `but`."""
        if mapped := self.rewards("rewards"):
            return mapped
        known = {name for names in self._columns.values() for name in names}
        found = {name: value for name, value in self.record.items() if name not in known and name not in but}
        return {
            str(name): float(value)
            for name, value in found.items()
            if isinstance(value, (bool, float)) or (isinstance(value, int) and abs(value) < 2**53)
        }

    def rewards(self, column: str) -> dict[str, float] | None:
        found = self.get(column)
        if not isinstance(found, Mapping):
            return None
        return {
            name: float(value)
            for name, value in found.items()
            if isinstance(value, (int, float)) and isinstance(name, str) and abs(value) < 2**53
        }

    def text(self, column: str) -> str | None:
        name, value = self._found(column)
        value = _one(value)
        if value is None:
            return None
        if not isinstance(value, (str, int)) or isinstance(value, bool):
            raise self._refuse(name, value, "text")
        return str(value).encode(errors="replace").decode()

    def _flat(self, name: str, items: list[Any] | tuple[Any, ...]) -> tuple[np.ndarray, np.ndarray]:
        self.budget.take(16 * len(items))
        if (packed := _packed(items)) is not None:
            return packed, np.ones(len(items), bool)
        kinds = set(map(type, items))
        if not kinds <= {int, float, bool, type(None)}:
            raise self._refuse(name, items, "a list of numbers")
        known = np.array([item is not None for item in items], bool)
        given = [0 if item is None else item for item in items]
        try:
            found = np.array(given, np.float64 if float in kinds else np.int64)
        except OverflowError as error:
            raise self._refuse(name, items, "a list of numbers") from error
        return found, known


_READERS: dict[pa.DataType, Callable[[Fields, str], Any]] = {
    tables.TOKENS: Fields.ids,
    tables.FLAGS: Fields.flags,
    tables.FLOATS: Fields.values,
    pa.string(): Fields.text,
    pa.float64(): Fields.number,
    pa.int64(): Fields.integer,
    pa.int32(): Fields.integer,
    tables.REWARDS: Fields.rewards,
}


def _reader(column: str) -> Callable[[Fields, str], Any] | None:
    if column in tables.GIVEN:
        return _READERS[tables.GIVEN[column].type]
    if column.endswith("_policy_version"):
        return Fields.integer
    if column == "split":
        return Fields.text
    return Fields.values if column.endswith(tables.TOKEN_SCORES) else None


def _packed(items: list[Any] | tuple[Any, ...]) -> np.ndarray | None:
    """Pack numbers with struct, which is faster than NumPy. Return None if the list contains anything else."""
    try:
        code, dtype = ("d", np.float64) if type(items[0]) is float else ("q", np.int64)
        return np.frombuffer(struct.pack(f"{len(items)}{code}", *items), dtype)
    except (IndexError, OverflowError, struct.error):
        return None


def _one(value: Any) -> Any:
    with suppress(ValueError):
        value = settled(value)
    if isinstance(value, np.ndarray) and value.size == 1:
        value = value.reshape(-1)[0]
    return value.item() if isinstance(value, np.generic) else value


def shown(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"an array {list(value.shape)} of {value.dtype}"
    if isinstance(value, (list, tuple)):
        odd = next((item for item in value if type(item) not in (int, float, bool, type(None))), None)
        return f"a list of {len(value)}" + ("" if odd is None else f" with {_short(odd)}")
    return _short(value)


def _short(value: Any) -> str:
    if isinstance(value, (dict, list, tuple)):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, (str, int, float, bool)):
        if isinstance(value, int) and abs(value) >= 2**63:
            return "an integer beyond 64 bits"
        text = json.dumps(value if not isinstance(value, float) or math.isfinite(value) else str(value))
        return text if len(text) <= 60 else f"{text[:57]}..."
    if isinstance(value, Foreign):
        return f"an object of {value}, which cannot be read"
    return "NULL" if value is None else f"a {type(value).__name__}"
