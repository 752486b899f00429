"""Describe the dump format of one framework, and iterate over the records in its files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...schemas.errors import ImportFailed
from .dump import DumpFolder, Part, Reading
from .dump_rows import DumpRows
from .fields import Fields
from .rowbatch import ROWS_AT_ONCE, RowBatch
from .textfiles import read_lines

RowsOf = Callable[[Fields, str, int], Iterable[dict[str, Any]]]
"""Function from (a record's fields, a name for the record, the record's number in the file) to the cells of each row
that the record contains: column in the trace -> value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """The dump format of one framework. Formats with JSON Lines files and one row per line need no functions."""

    name: str
    writes: str
    """Framework option that makes the framework write files in this format."""
    files: str
    """Pattern for the file names, shown in the docs and in messages."""
    columns: Mapping[str, tuple[str, ...]]
    """Column in the trace -> candidate fields in the file; the first field that exists is read."""
    alignment: str
    """Description, shown in the docs, of how values align with tokens and which values are placeholders."""
    pattern: str = ""
    """Regular expression that matches the end of each file's path. Its capturing group, if it has one, matches the step."""
    keys: frozenset[str] = frozenset()
    """Keys required in the first file's first object, if other formats use the same file names."""
    needs: tuple[str, ...] = ()
    """Columns that every line must supply."""
    lacks: Mapping[str, str] = field(default_factory=dict)
    """Pass -> message that explains why the files may lack logprobs from the pass, and how to obtain them."""
    lines: bool = False
    """True if a file holds rows from several steps and grows as rows are appended."""
    recognises: Callable[[DumpFolder], bool] | None = None
    """Function that detects files in this format in a folder; None if `pattern` and `keys` suffice."""
    parts: Callable[[DumpFolder], list[Part]] | None = None
    """Function that groups a folder's files by step; None if files are read one by one. Raises ImportFailed."""
    rows: RowsOf | None = None
    """Function that returns the rows in a line; None if each line is one row of plain fields. Raises ImportFailed."""
    read: Callable[[Reading], Iterator[RowBatch]] | None = None
    """Function that yields the rows in a part; None if the files are JSON Lines. Raises ImportFailed."""

    def is_in(self, folder: DumpFolder) -> bool:
        """Return True if a folder holds files in this format."""
        if self.recognises is not None:
            return self.recognises(folder)
        name = next((name for name, _ in folder.matching(self.pattern)), None)
        return name is not None and (not self.keys or self.keys <= first_object(folder, name).keys())

    def parts_of(self, folder: DumpFolder) -> list[Part]:
        """Return a folder's files, grouped into parts that are read together. Raises ImportFailed."""
        if self.parts is not None:
            return self.parts(folder)
        files = folder.matching(self.pattern)
        return [Part(files=(name,), step=int(found[1]) if found.re.groups else None) for name, found in files]

    def batches(self, reading: Reading) -> Iterator[RowBatch]:
        """Yield the rows of one part, by the trace's column names. Raises ImportFailed."""
        return self.read(reading) if self.read else read_rows(reading, self.rows or self._one_row)

    def _one_row(self, fields: Fields, name: str, number: int) -> list[dict[str, Any]]:
        for column in self.needs:
            fields.required(column)
        return [fields.cells()]


def first_object(folder: DumpFolder, name: str) -> dict[str, Any]:
    """Return the first object of a JSON Lines file.

    Returns an empty dict if the file has no object or is unreadable.
    """
    try:
        return next(read_lines(folder.path(name)), (0, {}))[1]
    except ImportFailed:
        return {}


def read_rows(
    reading: Reading,
    rows_of: RowsOf,
    *,
    files: Sequence[str] | None = None,
    records: Callable[[Path, int], Iterator[tuple[int, Mapping[str, Any]]]] = read_lines,
    unit: str = "line",
    at_once: int = ROWS_AT_ONCE,
) -> Iterator[RowBatch]:
    """Yield the rows of a part's files; `rows_of` converts one record.

    A row without a seq_id is named after its file and record number; a row without a step gets the step of the part.
    """
    budget = reading.budget()
    for name in reading.part.files if files is None else files:
        path = reading.folder.path(name)
        rows = DumpRows(str(path), unit)
        for number, record in records(path, reading.first_line.get(name, 1)):
            if path.suffix != ".json":
                reading.last_line[name] = number
            fields = reading.fields(record, f"{path}, {unit} {number}", budget)
            for place, cells in enumerate(rows_of(fields, f"{name}:{number}", number)):
                step = reading.part.step if cells.get("step") is None else cells["step"]
                own = {"seq_id": f"{name}:{number}" + (f".{place}" if place else "")}
                rows.add(number, **{**own, **cells, "step": step})
            if len(rows) >= at_once:
                yield rows.batch()
                rows = DumpRows(str(path), unit)
        if len(rows):
            yield rows.batch()
