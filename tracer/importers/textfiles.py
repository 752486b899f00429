"""Read files of a dump with bounded memory: whole, by line, and as rows of JSON Lines or a JSON array."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import fsspec
import msgspec

from ...schemas.errors import ImportFailed
from ..store import first_line, too_large
from .columns import ROWS_AT_ONCE, RowBatch, explained

_BUFFER_BYTES = 1 << 20
MAX_LINE = 256 << 20
"""Maximum length of a line, bytes. A line with a sequence of one million tokens is shorter."""
TIMES_AS_JSON = 16
"""Upper estimate of the memory taken by parsed JSON, in bytes per byte of JSON text."""


def opened(path: Path) -> BinaryIO:
    """Open a file for sequential reading, with a buffer suited to long lines."""
    return path.open("rb", buffering=_BUFFER_BYTES)


def whole_content(path: Path, times: int = 2) -> bytes:
    """Return a file's content. Raises ImportFailed if unreadable, or `times` its size does not fit in memory."""
    try:
        if (said := too_large(path.stat().st_size, times)) is not None:
            raise ImportFailed(f"{path}: {said}; split it, or import it on a larger machine")
        return path.read_bytes()
    except OSError as error:
        raise ImportFailed(f"{path}: cannot be read ({error.strerror or first_line(error)})") from error


def lines_of(file: Any, where: object) -> Iterator[Any]:
    """Yield the lines of a file, as bytes or text. Raises ImportFailed for a line longer than MAX_LINE."""
    number = 0
    while line := file.readline(MAX_LINE + 1):
        number += 1
        if len(line) > MAX_LINE:
            raise ImportFailed(
                f"{where}, line {number}: is longer than {MAX_LINE:,} bytes; is this a complete JSON Lines file?"
            )
        yield line


def json_names(filesystem: fsspec.AbstractFileSystem, name: str) -> list[str]:
    """Return all keys of a JSON file's objects. Raises ImportFailed."""
    names: dict[str, None] = {}
    for rows, _, _, _ in _json_rows(filesystem, name):
        names |= {key: None for row in rows for key in row}
    return list(names)


def json_rows(filesystem: fsspec.AbstractFileSystem, name: str, columns: Collection[str]) -> Iterator[RowBatch]:
    """Yield a JSON file's objects, with those requested columns that exist. Raises ImportFailed, naming the line."""
    for rows, numbers, unit, num_bytes in _json_rows(filesystem, name):
        present = [column for column in columns if any(column in row for row in rows)]
        values = {column: [row.get(column) for row in rows] for column in present}
        yield RowBatch(file=name, columns=values, numbers=numbers, unit=unit, num_bytes=num_bytes)


_LINE = "each line is one object"


def read_lines(path: Path, first: int = 1) -> Iterator[tuple[int, dict[str, Any]]]:
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


_Rows = tuple[list[dict[str, Any]], list[int], str, int]
"""JSON objects, their numbers in the file, what the numbers count (rows or lines), and the size of the objects in bytes."""


def _json_rows(filesystem: fsspec.AbstractFileSystem, name: str) -> Iterator[_Rows]:
    with explained(name, "JSON"), filesystem.open(name, "rb", compression="infer") as file:
        if name.removesuffix(".gz").endswith(".json") and _first_character(file) == b"[":
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
    """Parse JSON text. Raises ImportFailed."""
    # Python's json has better error messages and accepts NaN.
    with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return msgspec.json.decode(text)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ImportFailed(f"{where}: not JSON ({error}); {remedy}") from error


def as_object(value: Any, where: str, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ImportFailed(f'{where}: is not an object; {what}, for example {{"step": 1}}')
    return value
