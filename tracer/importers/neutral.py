"""The neutral way in: one row a sequence, with the names of the trace's own columns."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ... import __version__
from ...schemas.checksums import SealedFile
from ...schemas.clock import now
from ...schemas.errors import ImportFailed, TimTraceError
from ...schemas.manifest import Manifest
from ...schemas.steps import ALL_STEPS, parse_steps
from ..cluster import connected
from ..create import whole_trace
from ..progress import Progress, no_progress
from .arrowfiles import RowGroups
from .columns import METRIC_KINDS, Columns
from .dump import DumpFolder, Part, content_of
from .mapping import check_map, names_of
from .placeholders import ZeroLists
from .remote_file import RemoteFile
from .row_import import KINDS, KNOWN, PASSES, REQUIRED, Imported, RowImport
from .rowbatch import RowBatch, listed_names
from .rowfiles import RowFiles
from .selection import Selection, check_sample
from .unit_import import Piece, Unit, add_units, kept_manifest, room_of


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
    """Make a trace of Parquet files, or of JSON, CSV or Arrow files with the same names.

    One row a sequence: `step`, `prompt_ids`, `response_ids` and at least one of `rollout_logprobs`, `train_logprobs`,
    `current_logprobs` and `reference_logprobs`; optionally `seq_id`, `group_id`, `response_mask`, `entropy`, `reward`,
    `advantage` (a number or a list), `temperature`, `top_p`, `top_k`, `policy_version` and `finish_reason`. Lists are
    aligned with `response_ids`. A `metrics.parquet` (`step`, `name`, `value`) beside them is read too. `path` is a
    file, a folder (also one that `save_to_disk` of Hugging Face datasets wrote) or a pattern, on any file system that
    fsspec knows. `map` renames columns, theirs -> ours; what becomes "" is left out. `steps` (3:80, -10:) takes a part of
    the run, and `sample` a share of the sequences, chosen by a hash of their names.

    Placeholders become NULL: -9999, 0.0 where the mask is 0, and lists that hold nothing but 0.0 where another pass is
    not as certain of these tokens (ZeroLists has the rule).

    `ray`, the address of a Ray cluster (`auto`, `host:port`, or `local` for one that is started here), divides the files, and the row
    groups of large Parquet files, among its actors. The names in JSON files are read here first, since each row has its own.

    Raises ImportFailed, naming file, column and row. Nothing is left at `output` then, and with `force` the trace that
    lay there stays.
    """
    source = RowFiles.of(os.fspath(path))
    given = dict(map or {})
    files = source.names()
    check_map(given, files, KNOWN, source.url)
    names = {file: names_of(file, columns, given, KNOWN) for file, columns in files.items()}
    _check_columns(names, files, source.url)
    selection = Selection(steps=_chosen(source, names, steps), sample=check_sample(sample))
    from_where = f"import parquet {source.url}"
    room = None if ray is None else room_of(output)
    manifest = Manifest(run_id=str(uuid.uuid4()), created_at=now(), created_by=__version__, source=from_where)
    job = _Job(source, names, selection, _Files.of_rows(source))
    try:
        with (
            connected(ray),
            whole_trace(output, (room and kept_manifest(room, from_where)) or manifest, force=force) as folder,
            job.open_rows(folder) as rows,
        ):
            if ray is None or room is None:
                num_read = job.add_all(rows, progress)
            else:
                job.count()
                parts = [Part(files=(name,)) for name in source.files]
                num_read = add_units(job, parts, rows, folder, room, ordered=False, address=ray, progress=progress)
            job.finish(num_read, rows)
    except TimTraceError:
        raise
    except OSError as error:
        raise ImportFailed(f"{output}: could not be imported to ({error})") from error
    result = rows.result
    result.folder = Path(os.path.abspath(os.path.expanduser(output)))
    mapped = {theirs for columns in names.values() for theirs in columns}
    result.ignored_columns = (
        *(name for name in dict.fromkeys(name for columns in files.values() for name in columns) if name not in mapped),
        *result.ignored_columns,
    )
    return result


class _Job:
    """What is imported how."""

    def __init__(
        self, source: RowFiles, names: Mapping[str, Mapping[str, str]], selection: Selection, folder: DumpFolder
    ):
        """`names` says of each file which of its columns becomes which of ours."""
        self._source, self._names, self._selection = source, names, selection
        there = {theirs: ours for columns in names.values() for theirs, ours in columns.items()}
        self._passes = {column: name for column, name in PASSES.items() if column in there.values()}
        self._columns = sorted(there, key=lambda theirs: KNOWN.index(there[theirs]))
        self.folder = folder
        self._groups: RowGroups | None = None
        self._rows_before: dict[str, int] = {}
        self.seen: set[str] = set()
        self.sources: dict[str, SealedFile] = {}

    @property
    def name(self) -> str:
        """Of what is imported how."""
        steps = None if self._selection.steps is None else sorted(self._selection.steps)
        return f"parquet {self._source.url} {self._names} {steps} {self._selection.sample}"

    def fresh(self) -> _Job:
        """The same before anything was read."""
        job = _Job(self._source, self._names, self._selection, self.folder)
        job._rows_before = self._rows_before
        return job

    def open_rows(
        self, folder: Path, *, ordered: bool = False, zero_lists: ZeroLists | None = None, num_before: int = 0
    ) -> RowImport:
        """Where rows are recorded to."""
        return RowImport(
            folder, "parquet", self._source.url, selection=self._selection, ordered=ordered, zero_lists=zero_lists,
            num_before=num_before,
        )  # fmt: skip

    def add_all(self, rows: RowImport, progress: Progress) -> int:
        """Read everything and record it. The number of rows that were read."""
        num_read = 0
        with progress("importing", self.folder.num_bytes(self._source.files)) as advance:
            for batch in self._source.batches(self._columns):
                num_read += self._add(batch, rows)
                advance(batch.num_bytes)
        return num_read

    def add(self, part: Part, rows: RowImport) -> int:
        """Read a file, or the row groups that were taken of it, and record them. The number of rows that were read."""
        (name,) = part.files
        num_read = sum(self._add(batch, rows) for batch in self._source.rows(name, self._columns, self._groups))
        self.sources[name] = self.content(name, None)
        return num_read

    def _add(self, batch: RowBatch, rows: RowImport) -> int:
        rows.add_rows(batch, self._names[batch.file], self._passes)
        return len(batch.numbers)

    def finish(self, num_read: int, rows: RowImport) -> None:
        """Record what lies beside the rows, once all of them were read. Raises ImportFailed where there were none."""
        if not num_read:
            raise ImportFailed(f"{self._source.url}: holds no rows; each is one sequence")
        if not rows.result.num_sequences:
            raise ImportFailed(
                f"{self._source.url}: none of its {num_read} sequences was chosen; take a larger --sample"
            )
        for batch in self._source.metrics(METRIC_KINDS):
            rows.add_metrics(batch)

    def pieces(self, name: str, most: int) -> Iterator[Piece]:
        """The row groups of a Parquet file."""
        yield from self._source.groups(name, most)

    def take_piece(self, name: str, piece: Piece) -> None:
        """From now on read these row groups of a file alone."""
        assert isinstance(piece, RowGroups)
        self._groups = piece

    def count(self) -> None:
        """Count the rows before each file, where sequences are called by their numbers."""
        before = 0
        if all("seq_id" in columns.values() for columns in self._names.values()):
            return
        for name in self._source.files:
            self._rows_before[name] = before
            before += self._source.num_rows(name)

    def num_before(self, unit: Unit) -> int:
        """Rows that come before those of a unit, where sequences are called by their numbers."""
        before = self._rows_before.get(unit.parts[0].files[0], 0)
        return before + (unit.piece.first_row - 1 if isinstance(unit.piece, RowGroups) else 0)

    def content(self, name: str, lines: int | None) -> SealedFile:
        """What a file holds, or the row groups that were taken of it."""
        groups = self._groups
        if groups is None:
            return content_of(self.folder.path(name))
        return content_of(self.folder.path(name), start=groups.start, num_bytes=groups.num_bytes)

    def still_holds(self, name: str, content: SealedFile) -> bool:
        """Whether a file holds what it held."""
        return self.content(name, None) == content


@dataclass(frozen=True, slots=True, kw_only=True)
class _Files(DumpFolder):
    """Files that are called by their whole paths."""

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
    """The steps that are meant; None for all. Reads the column of steps of every file."""
    if steps == ALL_STEPS:
        return None
    theirs = {column for columns in names.values() for column, ours in columns.items() if ours == "step"}
    there: set[int] = set()
    for batch in source.batches(theirs):
        columns = Columns.of(batch, names[batch.file], {"step": KINDS["step"]})
        there.update(columns.list("step") or ())
    return frozenset(parse_steps(steps, sorted(there), of=source.url))


def _check_columns(names: Mapping[str, Mapping[str, str]], files: Mapping[str, Sequence[str]], where: str) -> None:
    """Raise ImportFailed unless each file has the required columns, and one of them logprobs."""
    some = any(files.values())
    for file, columns in names.items():
        if some and not files[file]:
            continue  # nothing was written there, as by a process without rows
        lacking = [name for name in REQUIRED if name not in columns.values()]
        if lacking:
            raise ImportFailed(
                f"{file}: lacks the columns {', '.join(lacking)} (found: {listed_names(files[file])}); map yours to "
                f"{'it' if len(lacking) == 1 else 'them'}, as theirs={lacking[0]}"
            )
    if not any(name in columns.values() for columns in names.values() for name in PASSES):
        found = dict.fromkeys(name for columns in files.values() for name in columns)
        raise ImportFailed(
            f"{where}: has no logprobs (found: {listed_names(list(found))}); map yours to {' or '.join(PASSES)}, as "
            f"theirs={next(iter(PASSES))}"
        )
