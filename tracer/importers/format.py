"""How the dumps of one framework are read: what a format says of itself, and the loop over the records of its files."""

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
"""The cells of the rows of a record (column of the trace -> value), of its fields, a name for it and its number in the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """How the dumps of one framework are read; a format of JSON lines with one row each needs no function of its own."""

    name: str
    writes: str
    """Which option of the framework writes these files."""
    files: str
    """How the files are called."""
    columns: Mapping[str, tuple[str, ...]]
    """Column of the trace -> names of the fields that it may be read from, the first that is there."""
    alignment: str
    """Which token a value belongs to, and what is no value."""
    pattern: str = ""
    """What the path of each file ends in; its group is the step."""
    keys: frozenset[str] = frozenset()
    """Keys of the first object of the first file, where other formats have files of the same name."""
    needs: tuple[str, ...] = ()
    """Columns without which a line is refused."""
    lacks: Mapping[str, str] = field(default_factory=dict)
    """Pass -> why it has no scores where no file holds them, and what would give them."""
    lines: bool = False
    """Whether a file has the rows of several steps and grows by lines."""
    recognises: Callable[[DumpFolder], bool] | None = None
    """Whether a folder holds such files, where pattern and keys do not say it."""
    parts: Callable[[DumpFolder], list[Part]] | None = None
    """The files of a folder, by step, where each file is not read on its own. Raises ImportFailed."""
    rows: RowsOf | None = None
    """The rows of a line, where it is not one with the columns of its fields. Raises ImportFailed."""
    read: Callable[[Reading], Iterator[RowBatch]] | None = None
    """The rows of a part whose files are not JSON lines. Raises ImportFailed."""

    def is_in(self, folder: DumpFolder) -> bool:
        """Whether a folder holds such files."""
        if self.recognises is not None:
            return self.recognises(folder)
        name = next((name for name, _ in folder.matching(self.pattern)), None)
        return name is not None and (not self.keys or self.keys <= first_object(folder, name).keys())

    def parts_of(self, folder: DumpFolder) -> list[Part]:
        """The files of a folder that are read together. Raises ImportFailed."""
        if self.parts is not None:
            return self.parts(folder)
        files = folder.matching(self.pattern)
        return [Part(files=(name,), step=int(found[1]) if found.re.groups else None) for name, found in files]

    def batches(self, reading: Reading) -> Iterator[RowBatch]:
        """The rows of one part, under the names of the trace's columns. Raises ImportFailed."""
        return self.read(reading) if self.read else read_rows(reading, self.rows or self._one_row)

    def _one_row(self, fields: Fields, name: str, number: int) -> list[dict[str, Any]]:
        for column in self.needs:
            fields.required(column)
        return [fields.cells()]


def first_object(folder: DumpFolder, name: str) -> dict[str, Any]:
    """The first object of a file of lines; empty where it has none that can be read."""
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
    """Read the records of a part's files: `rows_of` makes the rows of one. Those without a name are called by file, record and place.

    A row without a step has that of the part.
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
