"""Row groups of sealed files: which steps they hold, and in which order their rows are read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ...schemas.errors import DamagedTrace, QueryFailed
from ..snapshot import TableFile
from ..store import Store, first_line
from ..verified_file import FileCursor

BUCKET_TOKENS = 8 << 20
"""Response tokens, over all passes, that are sorted in memory at once; a larger step is sorted alone."""
SWEEP_BUCKETS = 128
"""Buckets that are filled while the files are read once."""


@dataclass(frozen=True, slots=True)
class Part:
    """A row group of a file."""

    entry: TableFile
    row_group: int
    steps: np.ndarray
    """The distinct steps of its rows, ascending."""
    tokens: np.ndarray
    """Response tokens of each of these, as far as the row group tells: its mean row's, times the rows."""
    num_bytes: int
    """Of the row group in the file."""

    def within(self, first: int, stop: int) -> Part:
        """The same of the steps from one on and before another."""
        kept = (self.steps >= first) & (self.steps < stop)
        return replace(self, steps=self.steps[kept], tokens=self.tokens[kept])


def read_parts(store: Store, entries: Sequence[TableFile]) -> Iterator[Part]:
    """The row groups of files, in the order of the files. Raises DamagedTrace."""
    for entry in entries:
        file = opened(store, entry)
        for number in range(file.num_row_groups):
            steps = np.asarray(read(store, entry, file, number, ["step"])["step"])
            found, rows = np.unique(steps, return_counts=True)
            group = file.metadata.row_group(number)
            num_bytes = sum(group.column(index).total_compressed_size for index in range(group.num_columns))
            yield Part(entry, number, found, rows * (_num_values(group) / len(steps)), num_bytes)


def _num_values(group: pq.RowGroupMetaData) -> int:
    """Values of the longest column: tokens where there are lists, and rows where there are none."""
    return int(max(group.column(index).num_values for index in range(group.num_columns)))


def opened(store: Store, entry: TableFile) -> pq.ParquetFile:
    """A file of a trace for reading. Raises DamagedTrace."""
    try:
        return pq.ParquetFile(pa.PythonFile(FileCursor(entry.file), mode="r"))
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(store, entry, error) from error


def read(
    store: Store, entry: TableFile, file: pq.ParquetFile, row_group: int, columns: list[str] | None = None
) -> pa.Table:
    """Columns of a row group. Raises DamagedTrace."""
    try:
        return file.read_row_group(row_group, columns=columns, use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(store, entry, error) from error


def _unreadable(store: Store, entry: TableFile, error: Exception) -> DamagedTrace | QueryFailed:
    if entry.file.error is not None:
        return entry.file.error
    return DamagedTrace(f"{store.shown(entry.relative)}: cannot be read ({first_line(error)}); restore it from a copy")


def sweeps(parts: Sequence[Part]) -> Iterator[list[int]]:
    """First steps of the buckets of each sweep, and the last bucket's end: rows of [b0, b1), [b1, b2), ... go together."""
    if not parts:
        return
    steps = np.concatenate([part.steps for part in parts])
    known, at = np.unique(steps, return_inverse=True)
    tokens = np.bincount(at, weights=np.concatenate([part.tokens for part in parts]))
    bounds, held = [int(known[0])], 0.0
    for step, count in zip(known.tolist(), tokens.tolist(), strict=True):
        if held and held + count > BUCKET_TOKENS:
            bounds.append(step)
            held = 0.0
        held += count
    bounds.append(int(known[-1]) + 1)
    for start in range(0, len(bounds) - 1, SWEEP_BUCKETS):
        yield bounds[start : start + SWEEP_BUCKETS + 1]
