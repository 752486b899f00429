"""Import files in the neutral format: one row per sequence, with the trace's column names."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...schemas.checksums import SealedFile
from ...schemas.errors import ImportFailed
from ...schemas.steps import ALL_STEPS, parse_steps
from ..progress import Progress, no_progress
from .arrowfiles import RowGroups
from .columns import METRIC_KINDS, Columns
from .dump import DumpFolder, Part, content_of
from .mapping import check_map, names_of
from .remote_file import RemoteFile
from .row_import import KINDS, KNOWN, PASSES, REQUIRED, Imported, RowImport
from .rowbatch import listed_names
from .rowfiles import RowFiles
from .selection import Selection, check_sample
from .unit_import import Job, Piece, Unit, import_parts


def import_parquet(
    path: str | os.PathLike[str],
    *,
    output: str | os.PathLike[str],
    map: Mapping[str, str] | None = None,
    steps: str = ALL_STEPS,
    sample: float = 1.0,
    force: bool = False,
    ray: str | None = None,
    progress: Progress = no_progress,
) -> Imported:
    """Convert Parquet, JSON, CSV or Arrow files with the trace's column names to a trace.

    Files have one row per sequence. The required columns are `step`, `prompt_ids`, `response_ids` and at least one of
    `rollout_logprobs`, `train_logprobs`, `current_logprobs` and `reference_logprobs`; optionally every other column
    that Recorder.add_sequences takes, and `entropy` and `top2_gap`. `advantage` is a number or a list, `rewards` a
    record of numbers. Lists are aligned with `response_ids`. A `metrics.parquet` (`step`, `name`, `value`) in the same
    folder is read too. `path` is a file, a folder (also one written by `save_to_disk` of Hugging Face datasets) or a
    glob pattern, on any file system that fsspec supports. `map` renames columns (file's name -> trace's name); a
    column mapped to "" is skipped. `steps` (3:80, -10:) selects steps, and `sample` a share of the sequences, chosen
    by a hash of their names.

    Placeholders become NULL: -9999, 0.0 where the mask is 0, and lists of only 0.0 unless another pass also has logprobs
    near 0 for the same tokens (see ZeroLists).

    `ray`, the address of a Ray cluster (`auto`, `host:port`, or `local` to start one), divides the files, and the row
    groups of large Parquet files, among its actors. JSON files are first scanned for their keys by this process.

    Raises ImportFailed, naming file, column and row. After an error, nothing is written to `output`, and with `force`
    an existing trace is kept.
    """
    source = RowFiles.of(os.fspath(path))
    given = dict(map or {})
    files = source.names()
    check_map(given, files, KNOWN, source.url)
    names = {file: names_of(file, columns, given, KNOWN) for file, columns in files.items()}
    _check_columns(names, files, source.url)
    selection = Selection(steps=_chosen(source, names, steps), sample=check_sample(sample))
    from_where = f"import parquet {source.url}"
    job = _Job(source, names, selection)
    parts = [Part(files=(name,)) for name in source.files]
    rows = import_parts(
        job, parts, output, from_where, ordered=False, grows=False, force=force, ray=ray, progress=progress
    )
    result = rows.result
    mapped = {theirs for columns in names.values() for theirs in columns}
    result.ignored_columns = (
        *(name for name in dict.fromkeys(name for columns in files.values() for name in columns) if name not in mapped),
        *result.ignored_columns,
    )
    return result


class _Job(Job):
    """An import from files in the neutral format."""

    def __init__(self, source: RowFiles, names: Mapping[str, Mapping[str, str]], selection: Selection):
        """`names`: file -> column in the file -> column in the trace."""
        super().__init__("parquet", _Files.of_rows(source), selection)
        self._source, self._names = source, names
        there = {theirs: ours for columns in names.values() for theirs, ours in columns.items()}
        self._passes = {column: name for column, name in PASSES.items() if column in there.values()}
        self._columns = sorted(there, key=lambda theirs: KNOWN.index(there[theirs]))
        self._groups: RowGroups | None = None
        self._rows_before: dict[str, int] = {}

    @property
    def name(self) -> str:
        steps = None if self.selection.steps is None else sorted(self.selection.steps)
        return f"parquet {self._source.url} {self._names} {steps} {self.selection.sample}"

    def fresh(self) -> _Job:
        job = _Job(self._source, self._names, self.selection)
        job._rows_before = self._rows_before
        return job

    def add(self, part: Part, rows: RowImport, advance: Callable[[int], None]) -> int:
        (name,) = part.files
        num_read = 0
        for batch in self._source.rows(name, self._columns, self._groups):
            rows.add_rows(batch, self._names[name], self._passes)
            num_read += len(batch.numbers)
            advance(batch.num_bytes)
        return num_read

    def finish(self, num_read: int, rows: RowImport) -> None:
        super().finish(num_read, rows)
        for batch in self._source.metrics(METRIC_KINDS):
            rows.add_metrics(batch)

    def pieces(self, name: str, most: int) -> Iterator[Piece]:
        yield from self._source.groups(name, most)

    def take_piece(self, name: str, piece: Piece) -> None:
        assert isinstance(piece, RowGroups)
        self._groups = piece

    def count(self) -> None:
        before = 0
        if all("seq_id" in columns.values() for columns in self._names.values()):
            return
        for name in self._source.files:
            self._rows_before[name] = before
            before += self._source.num_rows(name)

    def num_before(self, unit: Unit) -> int:
        before = self._rows_before.get(unit.parts[0].files[0], 0)
        return before + (unit.piece.first_row - 1 if isinstance(unit.piece, RowGroups) else 0)

    def content(self, name: str, lines: int | None) -> SealedFile:
        groups = self._groups
        if groups is None:
            return content_of(self.folder.path(name))
        return content_of(self.folder.path(name), start=groups.start, num_bytes=groups.num_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Files(DumpFolder):
    """A set of files that are named by their full paths."""

    @classmethod
    def of_rows(cls, source: RowFiles) -> _Files:
        return cls(
            url=source.url, root=Path(), files=source.files, filesystem=source.filesystem,
            remote={name: (name, source.size(name)) for name in source.files},
        )  # fmt: skip

    def path(self, name: str) -> RemoteFile:
        assert self.filesystem is not None
        return RemoteFile(filesystem=self.filesystem, path=name, url=name)


def _chosen(source: RowFiles, names: Mapping[str, Mapping[str, str]], steps: str) -> frozenset[int] | None:
    """Return the selected steps; None if all are selected. The step column of every file is read to find them."""
    if steps == ALL_STEPS:
        return None
    theirs = {column for columns in names.values() for column, ours in columns.items() if ours == "step"}
    there: set[int] = set()
    for batch in source.batches(theirs):
        columns = Columns.of(batch, names[batch.file], {"step": KINDS["step"]})
        there.update(columns.list("step") or ())
    return frozenset(parse_steps(steps, sorted(there), of=source.url))


def _check_columns(names: Mapping[str, Mapping[str, str]], files: Mapping[str, Sequence[str]], where: str) -> None:
    """Raise ImportFailed unless each file has the required columns, and at least one file has logprobs."""
    some = any(files.values())
    for file, columns in names.items():
        if some and not files[file]:
            continue  # an empty file, for example from a process without rows
        lacking = [name for name in REQUIRED if name not in columns.values()]
        if lacking:
            raise ImportFailed(
                f"{file}: lacks the columns {', '.join(lacking)} (found: {listed_names(files[file])}); map yours to "
                f"{'it' if len(lacking) == 1 else 'them'}, for example theirs={lacking[0]}"
            )
    if not any(name in columns.values() for columns in names.values() for name in PASSES):
        found = dict.fromkeys(name for columns in files.values() for name in columns)
        raise ImportFailed(
            f"{where}: has no logprobs (found: {listed_names(list(found))}); map yours to {' or '.join(PASSES)}, for "
            f"example theirs={next(iter(PASSES))}"
        )
