"""The description of one framework's dumps, and the loop over the records of their files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...schemas.errors import ImportFailed
from .dump import DumpFolder, Part, Reading
from .dump_rows import DumpRows
from .fields import Fields
from .remote_file import DumpFile
from .rowbatch import ROWS_AT_ONCE, RowBatch
from .textfiles import read_lines

RowsOf = Callable[[Fields, str, int], Iterable[dict[str, Any]]]
"""(fields of a record, a name for it, its number in the file) -> cells of its rows, column of the trace -> value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """The dumps of one framework; a format of JSON Lines with one row per line needs no functions."""

    name: str
    writes: str
    """The option of the framework that writes these files."""
    files: str
    """Pattern of the file names, for the docs and messages."""
    columns: Mapping[str, tuple[str, ...]]
    """Column of the trace -> candidate fields; the first that exists is read."""
    alignment: str
    """How values align with tokens, and which values are placeholders; for the docs."""
    pattern: str = ""
    """Regular expression for the end of each file's path; its group, if any, is the step."""
    keys: frozenset[str] = frozenset()
    """Keys required in the first file's first object, if other formats use the same file names."""
    needs: tuple[str, ...] = ()
    """Columns that every line must have."""
    lacks: Mapping[str, str] = field(default_factory=dict)
    """Pass -> why the files may lack its logprobs, and how to get them."""
    lines: bool = False
    """True if a file holds rows of several steps and is appended to."""
    recognises: Callable[[DumpFolder], bool] | None = None
    """Detects such files in a folder, if pattern and keys do not suffice."""
    parts: Callable[[DumpFolder], list[Part]] | None = None
    """Groups a folder's files by step, if they are not read one by one. Raises ImportFailed."""
    rows: RowsOf | None = None
    """Returns the rows of a line, if it is not one row of plain fields. Raises ImportFailed."""
    read: Callable[[Reading], Iterator[RowBatch]] | None = None
    """Yields the rows of a part, if its files are not JSON Lines. Raises ImportFailed."""

    def is_in(self, folder: DumpFolder) -> bool:
        """True if a folder holds files of this format."""
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
    """Return the first object of a JSON Lines file; an empty dict if it has none or is unreadable."""
    try:
        return next(read_lines(folder.path(name)), (0, {}))[1]
    except ImportFailed:
        return {}


def read_rows(
    reading: Reading,
    rows_of: RowsOf,
    *,
    files: Sequence[str] | None = None,
    records: Callable[[DumpFile, int], Iterator[tuple[int, Mapping[str, Any]]]] = read_lines,
    unit: str = "line",
    at_once: int = ROWS_AT_ONCE,
) -> Iterator[RowBatch]:
    """Yield the rows of a part's files; `rows_of` converts one record.

    A row without a seq_id is named after its file and record number; a row without a step gets the part's.
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
