from __future__ import annotations

import math
import re
import shlex
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from difflib import get_close_matches
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from ...schemas.errors import ImportFailed, InvalidOption, speaks_options
from ..ragged import Ragged, is_every_row
from .kinds import LOGGED, STEP, TEXT, WRONG, Kind, first_wrong, plain, required


class Columns:
    """Columns of imported rows, by their names in the trace. Missing columns are None."""

    def __init__(self, arrays: Mapping[str, pa.Array], num_rows: int):
        self._arrays = arrays
        self.num_rows = num_rows

    @classmethod
    def of(cls, rows: RowBatch, names: Mapping[str, str], kinds: Mapping[str, Kind]) -> Columns:
        """Convert a batch's columns. `names` maps the file's column names to the trace's. Raises ImportFailed."""
        arrays = {}
        for theirs, values in rows.columns.items():
            ours = names[theirs]
            arrays[ours] = _read(rows, values, theirs, ours, kinds[ours])
            if (element := kinds[ours].element) and element.element:
                arrays[ours] = _rectangular(rows, arrays[ours], theirs)
        return cls(arrays, len(rows.numbers))

    def __getitem__(self, name: str) -> pa.Array | None:
        return self._arrays.get(name)

    def take(self, rows: np.ndarray, *names: str) -> Columns:
        if is_every_row(rows, self.num_rows):
            return self
        places = pa.array(rows, pa.int64())
        arrays = {name: array.take(places) for name, array in self._arrays.items() if not names or name in names}
        return Columns(arrays, len(rows))

    def has(self, name: str) -> np.ndarray:
        array = self[name]
        if array is None:
            return np.zeros(self.num_rows, bool)
        return np.asarray(array.is_valid().to_numpy(zero_copy_only=False))

    def is_list(self, name: str) -> bool:
        array = self[name]
        return array is not None and bool(pa.types.is_list(array.type))

    def list(self, name: str) -> list[Any] | None:
        array = self[name]
        return None if array is None else array.to_pylist()

    def ragged(self, name: str) -> Ragged | None:
        """Return a list column [N, ...], or None if it is missing or all NULL. NULL lists become empty."""
        array = self[name]
        if array is None or array.null_count == len(array):
            return None
        lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False).astype(np.int64)
        values, shape = array.flatten(), list[int]()
        while pa.types.is_fixed_size_list(values.type):
            shape.append(values.type.list_size)
            values = values.flatten()
        valid = None if not values.null_count else values.is_valid().to_numpy(zero_copy_only=False)
        filled = values if valid is None else pc.fill_null(values, pa.scalar(0).cast(values.type))
        cells = filled.to_numpy(zero_copy_only=False).reshape(-1, *shape)
        if filled.get_total_buffer_size() > 2 * filled.nbytes:  # a slice would keep its whole batch in memory, so copy
            cells = cells.copy()
        return Ragged(cells, lengths, valid)


def _rectangular(rows: RowBatch, array: pa.Array, name: str) -> pa.Array:
    """Convert each token's list of values to a fixed-size list. Raises ImportFailed if the lists differ in length."""
    lengths_B = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    ends, values, sizes = np.cumsum(lengths_B), array.flatten(), list[int]()
    while pa.types.is_list(values.type):
        lengths = values.value_lengths().to_numpy(zero_copy_only=False)
        first = int(lengths[0]) if len(lengths) else 0
        if len(odd := np.flatnonzero((lengths != first) | (lengths == 0))):
            token = int(odd[0]) // math.prod(sizes)
            row = int(np.searchsorted(ends, token, side="right"))
            raise ImportFailed(
                f"{rows.file}: column {name!r} has a list of length {lengths[odd[0]]} at {rows.place(row)}, "
                f"token {token - int(ends[row] - lengths_B[row])}, but the first token's list has length {first}. "
                "Give each token the same number of values, at least one"
            )
        sizes += [first] if first else []
        values = values.flatten()
    for size in reversed(sizes):
        values = pa.FixedSizeListArray.from_arrays(values, size)
    offsets = pa.array(np.concatenate([[0], ends]).astype(np.int32))
    return pa.ListArray.from_arrays(offsets, values, mask=array.is_null() if array.null_count else None)


def _read(rows: RowBatch, values: pa.Array | Sequence[Any], theirs: str, ours: str, kind: Kind) -> pa.Array:
    given: Any = values
    type = "mixed values"
    try:
        array = given if isinstance(given, pa.Array) else _array(given, kind)
        type = re.sub(r"<(element|item): ", "<", str(array.type)).replace(" not null", "")
        return kind.column(array)
    except WRONG as error:
        raise wrong(rows, given, type, theirs, ours, kind) from error


def _array(values: Sequence[Any], kind: Kind) -> pa.Array:
    try:
        array = pa.array(values)
        element = array.type
        while pa.types.is_list(element):
            element = element.value_type
        if not pa.types.is_floating(element) or not _has_flags(values):
            return array
    except (pa.ArrowException, OverflowError):
        pass
    return pa.concat_arrays([kind.one(value) for value in values])


def _has_flags(values: Sequence[Any]) -> bool:
    """Return True if any value is a boolean, which Arrow would silently convert to 1.0 or 0.0."""
    kinds = set(map(type, values))
    return bool in kinds or (list in kinds and any(_has_flags(value) for value in values if type(value) is list))


def wrong(rows: RowBatch, given: Any, type: str, theirs: str, ours: str, kind: Kind) -> ImportFailed:
    values = _listed(rows, given, theirs)
    row = first_wrong(values, kind)
    name = repr(ours) if theirs == ours else f"{theirs!r} (mapped to {ours!r})"
    found = "" if row is None else f" ({rows.place(row)}{_odd(values[row], kind)})"
    return ImportFailed(f"{rows.file}: column {name} contains {type}, but each row needs {kind.wants}{found}")


def _listed(rows: RowBatch, given: Any, theirs: str) -> Any:
    try:
        return given.to_pylist() if isinstance(given, pa.Array) else given
    except UnicodeDecodeError as error:
        reason = f"contains bytes that are not valid UTF-8 ({error.reason})"
        raise ImportFailed(f"{rows.file}: column {theirs!r} {reason}") from error


def _odd(value: Any, kind: Kind) -> str:
    place = first_wrong(value, kind.element) if kind.element and isinstance(value, list) else None
    if place is not None:
        return f", element {place}: {_shown(value[place])}"
    return f": {_shown(value)}"


def _shown(value: Any) -> str:
    text = "NULL" if value is None else " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


METRIC_KINDS = {"step": STEP, "name": required(TEXT), "value": LOGGED, "text": TEXT}
"""Columns of a metrics file. `text`, which may be missing, has the values that are not numbers."""


def read_metrics(rows: RowBatch) -> list[tuple[int, str, Any]]:
    if lacking := [name for name in METRIC_KINDS if name not in rows.columns and name != "text"]:
        raise ImportFailed(
            f"{rows.file}: missing columns: {', '.join(lacking)}. A metrics file needs the columns step, name and value"
        )
    present = [name for name in ("step", "name", "text") if name in rows.columns]
    arrays = {name: _read(rows, rows.columns[name], name, name, METRIC_KINDS[name]).to_pylist() for name in present}
    given: Any = rows.columns["value"]
    if isinstance(given, pa.Array):
        _read(rows, given, "value", "value", LOGGED)
    elif first_wrong(given, LOGGED) is not None:
        raise wrong(rows, given, "mixed values", "value", "value", LOGGED)
    values = _listed(rows, plain(given) if isinstance(given, pa.Array) else given, "value")
    logged = [float(value) if isinstance(value, Decimal) else value for value in values]
    if "text" in arrays:
        logged = [text if value is None else value for value, text in zip(logged, arrays["text"], strict=True)]
    return list(zip(arrays["step"], arrays["name"], logged, strict=True))


ROWS_AT_ONCE = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBatch:
    file: str
    columns: dict[str, pa.Array | list[Any]]
    """Maps each column's name in the file to its values, one per row."""
    numbers: Sequence[int]
    unit: str = "row"
    """Word for a row in messages: row, line, sample, ..."""
    num_bytes: int = 0

    def place(self, row: int) -> str:
        return f"{self.unit} {self.numbers[row]}"


def shown_name(name: str) -> str:
    return name if name and name.isprintable() and name == name.strip() else repr(name)


def map_example(lacking: Iterable[str], names: Sequence[str]) -> str:
    """Return an option that maps columns to the missing ones, guessed from the names of the file's columns."""
    pairs: list[tuple[str, str]] = []
    for ours in lacking:
        free = [name for name in names if name not in dict(pairs)]
        near = get_close_matches(ours, free, n=1, cutoff=0.51)
        pairs.append((near[0] if near else f"their_{ours}", ours))
    if not speaks_options():
        return f"map={dict(pairs)}"
    return " ".join(f"--map {shlex.quote(f'{theirs}={ours}')}" for theirs, ours in pairs)


def listed_names(names: Sequence[str]) -> str:
    rest = len(names) - 20
    return ", ".join(map(shown_name, names[:20])) + (f" and {rest:,} more" if rest > 0 else "") or "none"


@contextmanager
def explained(name: str, format: str) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, EOFError, zlib.error, UnicodeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ImportFailed(f"{name} cannot be read as {format} ({reason})") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    steps: frozenset[int] | None = None
    sample: float = 1.0
    """Share of sequences to import, selected by hashing their names so that every import selects the same ones."""

    def __post_init__(self) -> None:
        if not 0.0 < self.sample <= 1.0:
            raise InvalidOption(
                f"got {self.sample}, expected a fraction greater than 0 and at most 1, e.g. 0.1", option="sample"
            )

    def keeps(self, steps: Sequence[int], seq_ids: Sequence[str]) -> np.ndarray:
        kept = np.ones(len(seq_ids), bool)
        if self.steps is not None:
            kept &= np.isin(np.array(steps, np.int64), list(self.steps))
        if self.sample < 1.0:
            bound = int(self.sample * 2**64)
            hashes = (xxhash.xxh3_64_intdigest(name.encode(errors="replace")) for name in seq_ids)
            kept &= np.array([found < bound for found in hashes], bool)
        return kept
