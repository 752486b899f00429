"""Read rows from JSON Lines, JSON arrays and CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Collection, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

import fsspec
import msgspec

from ...schemas.errors import ImportFailed
from ..store import too_large
from .remote_file import TIMES_AS_JSON, DumpFile, lines_of, opened
from .rowbatch import ROWS_AT_ONCE, RowBatch, explained, shown_name


def json_names(filesystem: fsspec.AbstractFileSystem, name: str) -> list[str]:
    """Return all keys of a JSON file's objects. Raises ImportFailed."""
    names: dict[str, None] = {}
    for rows, _, _, _ in _json_rows(filesystem, name):
        names |= {key: None for row in rows for key in row}
    return list(names)


def json_rows(filesystem: fsspec.AbstractFileSystem, name: str, columns: Collection[str]) -> Iterator[RowBatch]:
    """Yield the objects in a JSON Lines file or a JSON array, with the requested columns that exist.

    Raises ImportFailed, naming the line.
    """
    for rows, numbers, unit, num_bytes in _json_rows(filesystem, name):
        present = [column for column in columns if any(column in row for row in rows)]
        values = {column: [row.get(column) for row in rows] for column in present}
        yield RowBatch(file=name, columns=values, numbers=numbers, unit=unit, num_bytes=num_bytes)


_LINE = "each line is one object"


def read_lines(path: DumpFile, first: int = 1) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, object) from a JSON Lines file that may still grow, starting at line `first`.

    A last line without a newline is skipped unless it is complete JSON. Raises ImportFailed, naming the line.
    """
    try:
        with opened(path) as file:
            for number, line in enumerate(lines_of(file, path), start=1):
                if number < first or not line.strip():
                    continue
                where = f"{path}, line {number}"
                if not line.endswith(b"\n") and not _is_whole(line):
                    return
                yield number, as_object(parsed(line, where, _LINE), where, _LINE)
    except OSError as error:
        raise ImportFailed(f"{path}: cannot be read ({error.strerror or error})") from error


def _is_whole(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def csv_names(filesystem: fsspec.AbstractFileSystem, name: str) -> list[str]:
    """Return the column names in a CSV file's first row. Raises ImportFailed."""
    for chunk in _csv_chunks(filesystem, name):
        return chunk[0][1]
    return []


def csv_rows(filesystem: fsspec.AbstractFileSystem, name: str, columns: Collection[str]) -> Iterator[RowBatch]:
    """Yield the rows of a CSV file as text, with the requested columns that exist; an empty cell is None.

    Raises ImportFailed, naming the line.
    """
    header: list[str] | None = None
    for chunk in _csv_chunks(filesystem, name):
        if header is None:
            header, chunk = chunk[0][1], chunk[1:]
        rows = [(number, cells) for number, cells in chunk if cells]
        for number, cells in rows:
            if len(cells) != len(header):
                raise ImportFailed(
                    f"{name}, line {number}: has {len(cells)} cells, but the first line has {len(header)} columns; quote "
                    'lists, for example "[1, 2]"'
                )
        if rows:
            yield RowBatch(
                file=name,
                columns={
                    column: [cells[place] or None for _, cells in rows]
                    for place, column in enumerate(header)
                    if column in columns
                },
                numbers=[number for number, _ in rows],
                unit="line",
                is_text=True,
                num_bytes=sum(len(cell) + 1 for _, cells in rows for cell in cells),
            )


class _Object(dict[str, Any]):
    """A JSON object that records the first duplicate key in its text, if there is one."""

    repeated: str | None = None

    @classmethod
    def of(cls, pairs: list[tuple[str, Any]]) -> _Object:
        """Build an object from the pairs that the JSON parser passes to `object_pairs_hook`."""
        found = cls(pairs)
        if len(found) < len(pairs):
            keys = [key for key, _ in pairs]
            found.repeated = next(key for place, key in enumerate(keys) if key in keys[:place])
        return found


_Rows = tuple[list[dict[str, Any]], list[int], str, int]
"""JSON objects, their numbers in the file, what the numbers count (rows or lines), and the size of the objects in bytes."""


def _json_rows(filesystem: fsspec.AbstractFileSystem, name: str) -> Iterator[_Rows]:
    with explained(name, "JSON"), filesystem.open(name, "rb", compression="infer") as file:
        if _is_array(name) and _first_character(file) == b"[":
            file.seek(0)
            if (said := too_large(int(filesystem.size(name) or 0), TIMES_AS_JSON)) is not None:
                raise ImportFailed(f"{name}: {said}; write one object per line, as .jsonl")
            yield from _array_rows(name, file.read())
            return
        file.seek(0)
        rows: list[dict[str, Any]] = []
        numbers: list[int] = []
        num_bytes = 0
        for number, line in enumerate(lines_of(file, name), start=1):
            num_bytes += len(line)
            if not line.strip():
                continue
            where = f"{name}, line {number}"
            rows.append(as_object(parsed(line, where, _LINES), where, "each line is one sequence"))
            numbers.append(number)
            if len(rows) == ROWS_AT_ONCE:
                yield rows, numbers, "line", num_bytes
                rows, numbers, num_bytes = [], [], 0
        if rows:
            yield rows, numbers, "line", num_bytes


_LINES = "each line is one object, or a .json file is one array of objects"


def _is_array(name: str) -> bool:
    """Return True if a file's suffix permits a JSON array."""
    return name.removesuffix(".gz").endswith(".json")


def _first_character(file: Any) -> bytes:
    """Return the first byte that is not whitespace; empty if the file contains only whitespace."""
    while block := file.read(4096):
        text = block.removeprefix(b"\xef\xbb\xbf").lstrip()
        if text:
            return bytes(text[:1])
    return b""


def _array_rows(name: str, text: bytes) -> Iterator[_Rows]:
    values = parsed(text, name, "a .json file that begins with [ is one array of objects")
    rows = [as_object(value, f"{name}, row {row}", "each is one sequence") for row, value in enumerate(values, start=1)]
    for first in range(0, len(rows), ROWS_AT_ONCE):
        part = rows[first : first + ROWS_AT_ONCE]
        yield part, list(range(first + 1, first + 1 + len(part))), "row", len(text) * len(part) // len(rows)


def parsed(text: bytes, where: str, remedy: str) -> Any:
    """Parse JSON text to objects that record duplicate keys. Raises ImportFailed."""
    colons = text.count(b":")
    if _follow_quotes(text, colons):
        with suppress(
            msgspec.MsgspecError, UnicodeDecodeError, RecursionError
        ):  # Python's json has better error messages and accepts NaN
            value = msgspec.json.decode(text)
            if type(value) is dict and _num_keys(value) == colons:
                return _Object(value)
    try:
        return json.loads(text, object_pairs_hook=_Object.of)
    except (ValueError, RecursionError) as error:
        raise ImportFailed(f"{where}: not JSON ({error}); {remedy}") from error


def _follow_quotes(text: bytes, colons: int) -> bool:
    """Return True if every colon in a text directly follows a quote, as colons after keys do."""
    if colons > _FEW_COLONS:
        return text.count(b'":') == colons
    place = -1
    for _ in range(colons):  # searching for one byte is twenty times faster than searching for two
        place = text.find(b":", place + 1)
        if text[place - 1 : place] != b'"':
            return False
    return True


_FEW_COLONS = 256


def _num_keys(value: dict[str, Any] | list[Any]) -> int:
    """Count the keys in an object and in nested objects, looking only at the first element of each list.

    If the JSON text contains the same number of colons, no key is duplicated and no string contains a colon.
    """
    parts = value.values() if type(value) is dict else value
    inner = [
        part for part in parts if type(part) is dict or (type(part) is list and type(next(iter(part), 0)) in _NESTING)
    ]
    return (len(value) if type(value) is dict else 0) + sum(map(_num_keys, inner))


_NESTING = (dict, list)


def as_object(value: Any, where: str, what: str) -> dict[str, Any]:
    if not isinstance(value, _Object):
        raise ImportFailed(f'{where}: is not an object; {what}, for example {{"step": 1}}')
    if value.repeated is not None:
        raise ImportFailed(f"{where}: has the key {shown_name(value.repeated)} twice; give each column once")
    return value


def _csv_chunks(filesystem: fsspec.AbstractFileSystem, name: str) -> Iterator[list[tuple[int, list[str]]]]:
    """Yield the rows of a CSV file in chunks, header first. A row is (number of the row's last line in the file, cells)."""
    with (
        explained(name, "CSV"),
        filesystem.open(name, "rb", compression="infer") as file,
        io.TextIOWrapper(file, "utf-8-sig", newline="") as text,
    ):
        reader = csv.reader(lines_of(text, name), strict=True)
        while chunk := _chunk(reader):
            yield chunk


def _chunk(reader: Any) -> list[tuple[int, list[str]]]:
    # A long list of tokens exceeds the csv module's default limit.
    usual = csv.field_size_limit(_LONGEST_CELL)
    try:
        return [(reader.line_num, cells) for cells in islice(reader, ROWS_AT_ONCE)]
    finally:
        csv.field_size_limit(usual)


_LONGEST_CELL = 2**31 - 1
