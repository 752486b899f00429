"""Reading JSON lines that a run may still be adding to."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from ...schemas.errors import ImportFailed
from .dump import DumpFolder, Part, Reading
from .dump_rows import DumpRows
from .fields import Fields
from .remote_file import DumpFile, lines_of, opened
from .rowbatch import ROWS_AT_ONCE, RowBatch
from .textfiles import as_object, parsed

_WANTS = "each line is one object"


def read_lines(path: DumpFile, first: int = 1) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a file and the numbers of their lines, from a line on. Raises ImportFailed, naming the line.

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
                yield number, as_object(parsed(line, where, _WANTS), where, _WANTS)
    except OSError as error:
        raise ImportFailed(f"{path}: cannot be read ({error.strerror or error})") from error


def _is_whole(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def first_object(folder: DumpFolder, name: str) -> dict[str, Any]:
    """The first object of a file of lines; empty where it has none that can be read."""
    try:
        return next(read_lines(folder.path(name)), (0, {}))[1]
    except ImportFailed:
        return {}


def one_part_a_file(folder: DumpFolder, pattern: str) -> list[Part]:
    """Each file that is called like this, on its own."""
    return [Part(files=(name,)) for name, _ in folder.matching(pattern)]


def rows_of_lines(reading: Reading, row: Callable[[Fields, str], dict[str, Any] | None]) -> Iterator[RowBatch]:
    """Read the lines of a part's files: `row` makes a line's cells, from its fields and a name for it; None leaves it out."""
    for name, path in zip(reading.part.files, reading.paths(), strict=True):
        rows, budget = DumpRows(str(path), "line"), reading.budget()
        for number, record in read_lines(path, reading.first_line.get(name, 1)):
            reading.last_line[name] = number
            cells = row(reading.fields(record, f"{path}, line {number}", budget), f"{name}:{number}")
            if cells is not None:
                rows.add(number, **cells)
            if len(rows) == ROWS_AT_ONCE:
                yield rows.batch()
                rows = DumpRows(str(path), "line")
        if len(rows):
            yield rows.batch()
