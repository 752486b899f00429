from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from ..schemas.errors import DamagedTrace, TimTraceError
from ..schemas.results import Result
from ..schemas.size import parse_size
from ..schemas.sums import KINDS
from ..tracer.compaction.merge import merge, merge_to
from ..tracer.index import write_index
from ..tracer.progress import Progress, no_progress
from ..tracer.verified_file import FileCursor
from .rows import Rows, to_text
from .trace.source import Pair, open_source
from .trace.sum_tables import write_sums

COLUMNS = ("table", "files_before", "files_after", "bytes_before", "bytes_after", "files_left")
FILE_SIZE = "512MB"

_Sums = dict[tuple[str, Pair], pa.Table]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compaction(Result):
    _text = "tim_trace.analysis.compact:compaction_text"

    trace: str
    tables: Rows
    """One row per table. `files_left` counts files that are never merged: replays, and files that are already large."""

    @property
    def has_changed(self) -> bool:
        return any(row[1] for row in self.tables.rows)


def compact(
    trace: str | os.PathLike[str],
    *,
    output: str | os.PathLike[str] | None = None,
    file_size: str = FILE_SIZE,
    force: bool = False,
    progress: Progress = no_progress,
) -> Compaction:
    """Merge a trace's many files into a few of about `file_size` each, sorted by step and pass.

    Every result computed from the trace stays the same, bit for bit. The trace is rewritten in place, or written to
    `output` (a folder or URL), where an existing trace is replaced only with `force`. Interrupting is safe: the trace
    stays complete, and the next call picks up where the last one left off. A trace that is still being recorded
    is not merged. Replays, distributions and weights keep separate files.

    Raises InvalidOption, TraceNotFound, NewerTrace, TraceExists, StorageError, and DamagedTrace if a part is missing.
    """
    file_bytes = parse_size(file_size, option="file_size")
    path = os.fspath(trace)
    if output is not None:
        merged = merge_to(path, os.fspath(output), file_bytes, force=force, progress=progress)
        path = os.fspath(output)
    else:
        sums = _valid_sums(path)
        merged = merge(path, file_bytes, progress)
        if any(table.files_before for table in merged):
            _restore_sums(path, sums)
    rows = [tuple(getattr(table, column) for column in COLUMNS) for table in merged]
    return Compaction(trace=path, tables=Rows(COLUMNS, rows))


def _valid_sums(trace: str) -> _Sums:
    try:
        source = open_source(trace)
        return {
            (kind, pair): pq.read_table(pa.PythonFile(FileCursor(file), mode="r"))
            for kind, pairs in source.sums.items()
            for pair, file in pairs.items()
            if pair in source.covered
        }
    except (DamagedTrace, pa.ArrowException, OSError):  # missing sums are recomputed when needed
        return {}


def _restore_sums(trace: str, sums: _Sums) -> None:
    try:
        source = open_source(trace)
        if source.is_live:
            return
        folder = Path(source.store.root)
        for (kind, pair), rows in sums.items():
            write_sums(source, pair, KINDS[kind], rows)
        for names in open_source(source.store.url).outdated_sums.values():
            for name in names:
                (folder / name).unlink(missing_ok=True)
        write_index(folder)
    except (OSError, TimTraceError):  # missing sums are recomputed when needed
        return


def compaction_text(found: Compaction, width: int | None = None) -> str:
    if not found.has_changed:
        return f"{found.trace}: nothing to merge; the trace already has few files"
    return to_text(found.tables, width)
