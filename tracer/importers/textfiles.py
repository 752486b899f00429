"""Reading rows of JSON lines, of a JSON array and of CSV."""

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
    """Names that a JSON file's objects have, each once. Raises ImportFailed."""
    names: dict[str, None] = {}
    for rows, _, _, _ in _json_rows(filesystem, name):
        names |= {key: None for row in rows for key in row}
    return list(names)


def json_rows(filesystem: fsspec.AbstractFileSystem, name: str, columns: Collection[str]) -> Iterator[RowBatch]:
    """Give the objects of JSON lines or of one JSON array, with those of these columns that they have.

    Raises ImportFailed, naming the line.
    """
    for rows, numbers, unit, num_bytes in _json_rows(filesystem, name):
        present = [column for column in columns if any(column in row for row in rows)]
        values = {column: [row.get(column) for row in rows] for column in present}
        yield RowBatch(file=name, columns=values, numbers=numbers, unit=unit, num_bytes=num_bytes)


_LINE = "each line is one object"


def read_lines(path: DumpFile, first: int = 1) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a file of lines, which may still grow, and their numbers, from a line on. Raises ImportFailed, naming the line.

    A last line that does not end is not there yet, unless it is whole.
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
    """Names in the first row of a CSV file. Raises ImportFailed."""
    for chunk in _csv_chunks(filesystem, name):
        return chunk[0][1]
    return []


def csv_rows(filesystem: fsspec.AbstractFileSystem, name: str, columns: Collection[str]) -> Iterator[RowBatch]:
    """Give the rows of a CSV file as text, with those of these columns that it has; an empty cell is None.

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
                    f"{name}, line {number}: has {len(cells)} cells, and the first line names {len(header)} columns; quote "
                    'a list, as "[1, 2]"'
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
    """A JSON object that knows a key that came twice in it."""

    repeated: str | None = None

    @classmethod
    def of(cls, pairs: list[tuple[str, Any]]) -> _Object:
        """Take the pairs of an object as the JSON reader gives them."""
        found = cls(pairs)
        if len(found) < len(pairs):
            keys = [key for key, _ in pairs]
            found.repeated = next(key for place, key in enumerate(keys) if key in keys[:place])
        return found


_Rows = tuple[list[dict[str, Any]], list[int], str, int]
"""Objects, their numbers in the file, what these count, and the bytes that they took."""


def _json_rows(filesystem: fsspec.AbstractFileSystem, name: str) -> Iterator[_Rows]:
    with explained(name, "JSON"), filesystem.open(name, "rb", compression="infer") as file:
        if _is_array(name) and _first_character(file) == b"[":
            file.seek(0)
            if (said := too_large(int(filesystem.size(name) or 0), TIMES_AS_JSON)) is not None:
                raise ImportFailed(f"{name}: {said}; write one object a line, as .jsonl")
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


_LINES = "each line is one object, or the whole of a .json file one array of them"


def _is_array(name: str) -> bool:
    """Whether a file may be one JSON array: files of lines are called otherwise."""
    return name.removesuffix(".gz").endswith(".json")


def _first_character(file: Any) -> bytes:
    """The first byte of text that is no white space; empty in a file without one."""
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
    """The value of a JSON text. Raises ImportFailed."""
    colons = text.count(b":")
    if _follow_quotes(text, colons):
        with suppress(
            msgspec.MsgspecError, UnicodeDecodeError, RecursionError
        ):  # of which json says more, and it knows NaN
            value = msgspec.json.decode(text)
            if type(value) is dict and _num_keys(value) == colons:
                return _Object(value)
    try:
        return json.loads(text, object_pairs_hook=_Object.of)
    except (ValueError, RecursionError) as error:
        raise ImportFailed(f"{where}: not JSON ({error}); {remedy}") from error


def _follow_quotes(text: bytes, colons: int) -> bool:
    """Whether every colon of a text stands behind a quote, as those behind keys do."""
    if colons > _FEW_COLONS:
        return text.count(b'":') == colons
    place = -1
    for _ in range(colons):  # to find a byte takes a twentieth of looking for two
        place = text.find(b":", place + 1)
        if text[place - 1 : place] != b'"':
            return False
    return True


_FEW_COLONS = 256


def _num_keys(value: dict[str, Any] | list[Any]) -> int:
    """Keys of an object and of those in it, as far as they are seen at a glance.

    A text that has as many colons has no key twice, and a text in it no colon.
    """
    parts = value.values() if type(value) is dict else value
    inner = [
        part for part in parts if type(part) is dict or (type(part) is list and type(next(iter(part), 0)) in _NESTING)
    ]
    return (len(value) if type(value) is dict else 0) + sum(map(_num_keys, inner))


_NESTING = (dict, list)


def as_object(value: Any, where: str, what: str) -> dict[str, Any]:
    if not isinstance(value, _Object):
        raise ImportFailed(f'{where}: is no object; {what}, as {{"step": 1}}')
    if value.repeated is not None:
        raise ImportFailed(f"{where}: has the key {shown_name(value.repeated)} twice; each column comes once")
    return value


def _csv_chunks(filesystem: fsspec.AbstractFileSystem, name: str) -> Iterator[list[tuple[int, list[str]]]]:
    """Rows of a CSV file, the first of them its header: the number of their last line, and their cells."""
    with (
        explained(name, "CSV"),
        filesystem.open(name, "rb", compression="infer") as file,
        io.TextIOWrapper(file, "utf-8-sig", newline="") as text,
    ):
        reader = csv.reader(lines_of(text, name), strict=True)
        while chunk := _chunk(reader):
            yield chunk


def _chunk(reader: Any) -> list[tuple[int, list[str]]]:
    # A list of many tokens is longer than the cells that the module reads otherwise.
    usual = csv.field_size_limit(_LONGEST_CELL)
    try:
        return [(reader.line_num, cells) for cells in islice(reader, ROWS_AT_ONCE)]
    finally:
        csv.field_size_limit(usual)


_LONGEST_CELL = 2**31 - 1
