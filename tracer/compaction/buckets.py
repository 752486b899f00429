"""Sort a table by step: partition its rows into buckets on disk, and sort each bucket in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ...schemas.tables import Table
from ..seal import ROW_GROUP_TOKENS, response_lengths, row_group_bounds
from ..snapshot import TableFile
from ..store import Store, damaged, first_line
from ..verified_file import FileCursor

BUCKET_TOKENS = 8 << 20
"""Maximum number of response tokens in a bucket. A step with more tokens gets a bucket of its own."""
SWEEP_BUCKETS = 128
"""Maximum number of buckets to fill in one pass over the files."""
STEP_TOKENS = 32 << 10
"""Minimum number of response tokens in a row group. Smaller steps share a group."""
_MAX_STEP_TOKENS, _ROW_GROUPS = 128 << 10, 1024
"""For large files, STEP_TOKENS is raised up to _MAX_STEP_TOKENS, so that a file has about _ROW_GROUPS row groups."""

_OPTIONS = pa.ipc.IpcWriteOptions(compression="lz4")


@dataclass(frozen=True, slots=True)
class Part:
    entry: TableFile
    row_group: int
    steps: np.ndarray
    tokens: np.ndarray
    num_bytes: int


def read_parts(store: Store, entries: Sequence[TableFile]) -> Iterator[Part]:
    for entry in entries:
        with _readable(store, entry):
            file = _opened(entry)
        for number in range(file.num_row_groups):
            with _readable(store, entry):
                steps = np.asarray(file.read_row_group(number, columns=["step"], use_threads=False)["step"])
            found, rows = np.unique(steps, return_counts=True)
            group = file.metadata.row_group(number)
            columns = [group.column(index) for index in range(group.num_columns)]
            # The longest column has one value per token, or one per row in tables without lists.
            tokens = rows * (max(column.num_values for column in columns) / len(steps))
            yield Part(entry, number, found, tokens, sum(column.total_compressed_size for column in columns))


def _opened(entry: TableFile) -> pq.ParquetFile:
    return pq.ParquetFile(pa.PythonFile(FileCursor(entry.file), mode="r"))


@contextmanager
def _readable(store: Store, entry: TableFile) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        found = damaged(f"{store.shown(entry.relative)} cannot be read ({first_line(error)})")
        raise entry.file.error or found from error


def sweeps(parts: Sequence[Part]) -> Iterator[list[int]]:
    """Yield bucket bounds b0, b1, ... for each pass over the files. Buckets cover steps [b0, b1), [b1, b2), ..."""
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


def step_tokens(parts: Sequence[Part], file_bytes: int) -> int:
    """Return the minimum number of response tokens per row group in merged files of about `file_bytes`."""
    tokens = float(sum(part.tokens.sum() for part in parts))
    of_file = tokens * min(1.0, file_bytes / max(sum(part.num_bytes for part in parts), 1))
    return int(min(max(of_file / _ROW_GROUPS, STEP_TOKENS), _MAX_STEP_TOKENS))


def sorted_groups(
    store: Store, table: Table, parts: Sequence[Part], small: int, room: Path, advance: Callable[[int], None]
) -> Iterator[pa.Table]:
    """Yield row groups bucket by bucket, each bucket sorted by pass and then by step.

    A row group holds whole steps, unless one step exceeds ROW_GROUP_TOKENS. Steps with fewer than `small` tokens share
    a group. `room` is a temporary folder, and `advance` receives the number of rows read. Raises DamagedTrace.
    """
    for bounds in sweeps(parts):
        names = [room / f"{number}.arrow" for number in range(len(bounds) - 1)]
        _fill(store, table, parts, bounds, names, advance)
        for name in names:
            with pa.OSFile(str(name)) as file:
                rows = pa.ipc.open_stream(file).read_all()
            name.unlink()
            if rows.num_rows:
                keys = [("pass", "ascending")] if "pass" in rows.column_names else []
                yield from _row_groups(rows.take(pc.sort_indices(rows, [*keys, ("step", "ascending")])), small)


def _fill(
    store: Store, table: Table, parts: Sequence[Part], bounds: list[int], names: list[Path],
    advance: Callable[[int], None],
) -> None:  # fmt: skip
    schema, edges = table.schema, np.array(bounds)
    with ExitStack() as stack:
        buckets = [stack.enter_context(pa.ipc.new_stream(str(name), schema, options=_OPTIONS)) for name in names]
        before, file = "", None
        for part in parts:
            first, last = np.searchsorted(part.steps, edges[[0, -1]])
            if first == last:
                continue
            with _readable(store, part.entry):
                if file is None or part.entry.relative != before:
                    before, file = part.entry.relative, _opened(part.entry)
                rows = file.read_row_group(part.row_group, use_threads=False)
            steps = np.asarray(rows["step"])
            for batch in rows.combine_chunks().to_batches():
                completed = table.completed(batch)
                assert completed is not None  # column types were checked when the trace was opened
                at = np.searchsorted(edges, np.asarray(completed["step"]), side="right") - 1
                for bucket in np.unique(at[(at >= 0) & (at < len(names))]).tolist():
                    buckets[bucket].write_batch(completed.filter(pa.array(at == bucket)))
            advance(int(np.count_nonzero((steps >= edges[0]) & (steps < edges[-1]))))


def _row_groups(rows: pa.Table, small: int) -> Iterator[pa.Table]:
    sizes = np.maximum(response_lengths(rows), 1)
    tokens = np.concatenate([[0], np.cumsum(sizes)])
    ends_of_passes = {rows.num_rows}
    if "pass" in rows.column_names:
        ends_of_passes |= set(_changes(pc.dictionary_encode(rows["pass"].combine_chunks()).indices))
    start = before = 0
    for end in sorted({*_changes(rows["step"]), *ends_of_passes}):
        if before > start and tokens[end] - tokens[start] > ROW_GROUP_TOKENS:
            yield rows.slice(start, before - start)
            start = before
        if tokens[end] - tokens[start] >= small or end in ends_of_passes:
            for first, stop in row_group_bounds(sizes[start:end], ROW_GROUP_TOKENS):
                yield rows.slice(start + first, stop - first)
            start = end
        before = end


def _changes(values: pa.Array | pa.ChunkedArray) -> list[int]:
    return [int(position) + 1 for position in np.flatnonzero(np.diff(np.asarray(values)))]
