from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import fsspec
import msgspec

from ...schemas.errors import ImportFailed
from ..store import first_line, too_large
from .columns import ROWS_AT_ONCE, RowBatch, explained

_BUFFER_BYTES = 1 << 20
_BLOCK_BYTES = 8 << 20
"""Approximate amount of text to parse at a time (bytes). A longer line is parsed whole."""
MAX_LINE = 256 << 20
"""Maximum line length (bytes). Enough for a sequence with one million tokens."""
TIMES_AS_JSON = 16
"""Approximate maximum memory for parsed JSON, as a multiple of the text size."""


def opened(path: Path) -> BinaryIO:
    return path.open("rb", buffering=_BUFFER_BYTES)


def whole_content(path: Path, times: int = 2) -> bytes:
    """Return a file's content. Raises ImportFailed if the file's size times `times` exceeds the machine's memory."""
    with readable(path):
        if (said := too_large(path.stat().st_size, times)) is not None:
            raise ImportFailed(f"{path}: {said}. Split the file, or import it on a larger machine")
        return path.read_bytes()


@contextmanager
def readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or first_line(error)
        raise ImportFailed(f"{path} cannot be read ({reason}). Check its permissions") from error


def lines_of(file: Any, where: object) -> Iterator[tuple[int, bytes]]:
    number = 0
    while line := file.readline(MAX_LINE + 1):
        number += 1
        if len(line) > MAX_LINE:
            raise ImportFailed(
                f"{where}, line {number} is longer than {MAX_LINE:,} bytes. Check that the file is valid JSON Lines"
            )
        if line.strip():
            yield number, line


def json_names(filesystem: fsspec.AbstractFileSystem, name: str) -> list[str]:
    return list(dict.fromkeys(key for _, record, _, _ in _json_objects(filesystem, name) for key in record))


def json_rows(filesystem: fsspec.AbstractFileSystem, name: str, columns: Collection[str]) -> Iterator[RowBatch]:
    objects = _json_objects(filesystem, name)
    while part := list(_block(objects)):
        numbers, rows, units, sizes = zip(*part, strict=True)
        present = [column for column in columns if any(column in row for row in rows)]
        values = {column: [row.get(column) for row in rows] for column in present}
        yield RowBatch(file=name, columns=values, numbers=numbers, unit=units[0], num_bytes=sum(sizes))


def _block(objects: Iterator[Any]) -> Iterator[Any]:
    num_bytes = 0
    for one in islice(objects, ROWS_AT_ONCE):
        yield one
        num_bytes += one[-1]
        if num_bytes >= _BLOCK_BYTES:
            return


_LINE = "each line must be one object"
_LINES = "each line must be one object, except that a .json file may contain one array of objects"


def read_lines(path: Path, first: int = 1) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, object), starting at line `first`. The file may still be growing, so an unterminated last
    line is skipped unless it is complete JSON."""
    with readable(path), opened(path) as file:
        yield from line_objects(file, path, _LINE, [], first)


def line_objects(
    file: BinaryIO, path: Path, wants: str, notes: list[str], first: int = 1
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Like `read_lines`, for an open file. Adds a sentence to `notes` if the last line is incomplete."""
    for number, line in lines_of(file, path):
        if number < first:
            continue
        where = f"{path}, line {number}"
        try:
            value = parsed(line, where, wants)
        except ImportFailed:
            if line.endswith(b"\n"):
                raise
            notes.append(f"{where} is incomplete and was not read")
            return
        yield number, as_object(value, where, wants)


def _json_objects(filesystem: fsspec.AbstractFileSystem, name: str) -> Iterator[tuple[int, dict[str, Any], str, int]]:
    with explained(name, "JSON"), filesystem.open(name, "rb", compression="infer") as file:
        begins = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
        if name.removesuffix(".gz").endswith(".json") and begins[:1] == b"[":
            file.seek(0)
            if (said := too_large(int(filesystem.size(name) or 0), TIMES_AS_JSON)) is not None:
                raise ImportFailed(f"{name}: {said}. Write one object per line in a .jsonl file")
            text = file.read()
            values = parsed(text, name, "a .json file that begins with [ must be an array of objects")
            for row, value in enumerate(values, start=1):
                record = as_object(value, f"{name}, row {row}", "each row must be an object with one sequence")
                yield row, record, "row", len(text) // len(values)
            return
        file.seek(0)
        for number, line in lines_of(file, name):
            where = f"{name}, line {number}"
            record = as_object(parsed(line, where, _LINES), where, "each line must be an object with one sequence")
            yield number, record, "line", len(line)


def parsed(text: bytes, where: str, remedy: str) -> Any:
    # If msgspec fails, try Python's json, which has better error messages and also accepts NaN.
    with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return msgspec.json.decode(text)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ImportFailed(f"{where} is not JSON ({error}): {remedy}") from error


def as_object(value: Any, where: str, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ImportFailed(f'{where} is not an object: {what}, e.g. {{"step": 1}}')
    return value
