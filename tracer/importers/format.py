from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import xxhash

from ...schemas.checksums import SealedFile, sealed
from ...schemas.errors import ImportFailed
from .columns import ROWS_AT_ONCE, RowBatch
from .dump_rows import DumpRows
from .fields import Fields
from .pickles import Budget
from .textfiles import opened, read_lines, readable, whole_content


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpFolder:
    url: str
    root: Path
    files: tuple[str, ...]
    """Paths relative to `root` in natural order (step_2 before step_10)."""
    is_file: bool = False

    passes: Mapping[str, str] = field(default_factory=dict)
    """Each file's pass name. Empty unless several paths were given, each of which becomes a pass."""

    @classmethod
    def of_paths(cls, paths: Sequence[str | os.PathLike[str]], names: Sequence[str]) -> DumpFolder:
        """List the files in several paths. Each path becomes one pass, and `names` lists the pass names in order."""
        folders = [cls.of(path) for path in paths]
        roots = [os.path.realpath(each.root) for each in folders]
        root = Path(os.path.commonpath(roots))
        files: dict[str, str] = {}
        for name, at, folder in zip(names, roots, folders, strict=True):
            for file in folder.files:
                if files.setdefault(os.path.relpath(os.path.join(at, file), root), name) != name:
                    raise ImportFailed(f"{folder.url}: {file} was given twice. Pass each file once")
        return cls(url=", ".join(each.url for each in folders), root=root, files=tuple(files), passes=files)

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> DumpFolder:
        """List the files in a folder, or only `path` if it is a file. Links that leave the folder are not followed."""
        url = os.fspath(path)
        if "://" in url:
            raise ImportFailed(
                f"{url}: only the parquet format can be read from a URL. Copy the folder to this machine first"
            )
        given = Path(os.path.abspath(os.path.expanduser(url)))
        if given.is_file():
            return cls(url=url, root=given.parent, files=(given.name,), is_file=True)
        if not given.is_dir():
            raise ImportFailed(f"{url}: not found. Pass the folder that the framework wrote to")
        root, found = Path(os.path.realpath(given)), []
        for base, folders, names in os.walk(root):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            found += [os.path.relpath(os.path.join(base, name), root) for name in names if not name.startswith(".")]
        return cls(url=url, root=root, files=tuple(sorted(found, key=_in_order)))

    def matching(self, pattern: str) -> dict[str, re.Match[str]]:
        return dict(self._matches(pattern))

    def first(self, pattern: str) -> str | None:
        return next((name for name, _ in self._matches(pattern)), None)

    def _matches(self, pattern: str) -> Iterator[tuple[str, re.Match[str]]]:
        wanted = re.compile(rf"(?:.*/)?(?:{pattern})")
        return ((name, found) for name in self.files if (found := wanted.fullmatch(name)))

    def path(self, name: str) -> Path:
        path = self.root / name
        if not self.is_file and not os.path.realpath(path).startswith(f"{self.root}{os.sep}"):
            raise ImportFailed(
                f"{path} is a link that points outside the folder, so it was not followed. Import the link's target"
            )
        with readable(path):
            if not stat.S_ISREG(os.stat(path).st_mode):
                raise ImportFailed(f"{path} is not a regular file. Remove it")
        return path

    def num_bytes(self, names: Sequence[str]) -> int:
        return sum(os.stat(self.root / name).st_size for name in names if (self.root / name).exists())

    def beside(self, name: str, other: str) -> str | None:
        found = os.path.normpath(os.path.join(os.path.dirname(name), other))
        return found if (self.root / found).is_file() else None


def _in_order(name: str) -> list[Any]:
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name)]


_READ_BYTES = 1 << 20


def content_of(path: Path, *, lines: int | None = None, num_bytes: int | None = None) -> SealedFile:
    digest, size = xxhash.xxh3_128(), 0
    with opened(path) as file:
        whole = iter(lambda: file.read(_READ_BYTES if num_bytes is None else min(_READ_BYTES, num_bytes - size)), b"")
        for block in whole if lines is None else islice(file, lines):
            digest.update(block)
            size += len(block)
    return SealedFile(num_bytes=size, hash=digest.hexdigest(), num_rows=lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Files that are read together: all files for one step, or one file with rows from several steps."""

    files: tuple[str, ...]
    step: int | None = None
    """Step that every row belongs to, or None if each row has its own step field."""
    waits_for: str | None = None


@dataclass(slots=True, kw_only=True)
class Reading:
    folder: DumpFolder
    part: Part
    columns: Mapping[str, tuple[str, ...]]
    seen: set[str]
    first_line: Mapping[str, int] = field(default_factory=dict)
    """Number of the first line to import from each JSON Lines file, counted from 1."""
    last_line: dict[str, int] = field(default_factory=dict)
    """Number of the last complete line in each JSON Lines file, counted from 1. Set by the reader."""
    partial: bool = False
    added: tuple[str, ...] = ()
    """Columns that `map` adds, or reads from a different field than the format does."""
    sources: dict[str, SealedFile] = field(default_factory=dict)
    without_values: list[str] = field(default_factory=list)
    """Files that were skipped because no request in them has logprobs. Set by the reader."""
    num_text: int = 0
    """Rollouts that were skipped because they are text without token ids. Set by the reader."""
    budget: Budget = field(init=False)

    def __post_init__(self) -> None:
        self.budget = self.new_budget()

    def new_budget(self) -> Budget:
        return Budget(", ".join(self.part.files[:2]), self.folder.num_bytes(self.part.files))

    def contents(self) -> Iterator[tuple[Path, bytes]]:
        for name in self.part.files:
            content = whole_content(path := self.folder.path(name))
            self.sources[name] = sealed(content)
            yield path, content

    def fields(self, record: Mapping[Any, Any], where: str) -> Fields:
        return Fields(record, self.columns, where, self.seen, self.budget, self.added)


RowsOf = Callable[[Fields, str, int], Iterable[dict[str, Any]]]
"""Function that converts a record to rows, given its fields, its name and its number in the file. A row is a dict from
column to cell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A framework's dump format."""

    name: str
    writes: str
    """Option that makes the framework write this format."""
    files: str
    columns: Mapping[str, tuple[str, ...]]
    """Possible fields for each trace column. The first one found in the file is read."""
    alignment: str
    """How values align with tokens and which values are placeholders. Shown in the docs."""
    pattern: str = ""
    """Regular expression matched against the end of each file's path. Its group, if any, captures the step."""
    lacks: Mapping[str, str] = field(default_factory=dict)
    """For each pass, a note on why files may lack its logprobs and how to get them."""
    contracts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """For each pass, the settings known from the format, such as the precision of stored values."""
    lines: bool = False
    """True if a file contains several steps and grows as rows are appended."""
    recognises: Callable[[DumpFolder], bool] | None = None
    """Function that detects this format in a folder. None if `pattern` suffices."""
    parts: Callable[[DumpFolder], list[Part]] | None = None
    """Function that groups a folder's files by step. None if each file is read on its own."""
    passes: Callable[[DumpFolder], Mapping[str, tuple[str, Mapping[str, Any]]]] | None = None
    """Function that returns each file's pass name and settings. None if all files belong to the same passes."""
    read: Callable[[Reading], Iterator[RowBatch]] | None = None
    """Function that yields a part's rows. None if each line of a JSON Lines file is one row with plain fields."""

    def is_in(self, folder: DumpFolder) -> bool:
        if self.recognises is not None:
            return self.recognises(folder)
        return folder.first(self.pattern) is not None

    def parts_of(self, folder: DumpFolder) -> list[Part]:
        if self.parts is not None:
            return self.parts(folder)
        files = folder.matching(self.pattern).items()
        return [Part(files=(name,), step=int(found[1]) if found.re.groups else None) for name, found in files]

    def batches(self, reading: Reading) -> Iterator[RowBatch]:
        return self.read(reading) if self.read else read_rows(reading, _one_row)


def _one_row(fields: Fields, name: str, number: int) -> list[dict[str, Any]]:
    for column in ("step", "response_ids"):
        fields.required(column)
    return [fields.cells()]


def first_object(folder: DumpFolder, name: str) -> dict[str, Any]:
    try:
        return next(read_lines(folder.path(name)), (0, {}))[1]
    except ImportFailed:
        return {}


def read_rows(
    reading: Reading, rows_of: RowsOf, *,
    records: Callable[[Path, int], Iterator[tuple[int, Mapping[str, Any]]]] = read_lines, unit: str = "line",
    at_once: int = ROWS_AT_ONCE,
) -> Iterator[RowBatch]:  # fmt: skip
    """Yield rows from a part's files. Rows without seq_id are named after their file and record number."""
    for name in reading.part.files:
        path = reading.folder.path(name)
        rows = DumpRows(str(path), unit)
        for number, record in records(path, reading.first_line.get(name, 1)):
            if path.suffix != ".json":
                reading.last_line[name] = number
            fields = reading.fields(record, f"{path}, {unit} {number}")
            for place, cells in enumerate(rows_of(fields, f"{name}:{number}", number)):
                step = reading.part.step if cells.get("step") is None else cells["step"]
                own = {"seq_id": f"{name}:{number}" + (f".{place}" if place else "")}
                rows.add(number, **{**own, **fields.added_cells(cells), **cells, "step": step})
            if len(rows) >= at_once:
                yield rows.batch()
                rows = DumpRows(str(path), unit)
        if len(rows):
            yield rows.batch()
