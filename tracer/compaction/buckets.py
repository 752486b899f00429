"""Rows of a table brought into the order of their steps: laid into buckets of steps on disk, each sorted in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ...schemas.tables import Table
from ..seal import ROW_GROUP_TOKENS, response_lengths, row_group_bounds
from ..store import Store
from .parts import Part, opened, read, sweeps

STEP_TOKENS = 32 << 10
"""Steps that are smaller share a row group, until it has as many response tokens, or more of a long run:"""
_MAX_STEP_TOKENS, _ROW_GROUPS = 128 << 10, 1024
"""as many as leave about so many row groups in a file. To look for one step in thousands takes longer than to read a larger one."""

_OPTIONS = pa.ipc.IpcWriteOptions(compression="lz4")


def step_tokens(parts: Sequence[Part], file_bytes: int) -> int:
    """Response tokens that a row group of small steps has, in merged files of about so many bytes."""
    tokens = float(sum(part.tokens.sum() for part in parts))
    of_file = tokens * min(1.0, file_bytes / max(sum(part.num_bytes for part in parts), 1))
    return int(min(max(of_file / _ROW_GROUPS, STEP_TOKENS), _MAX_STEP_TOKENS))


def sorted_groups(
    store: Store, table: Table, parts: Sequence[Part], small: int, room: Path, advance: Callable[[int], None]
) -> Iterator[pa.Table]:
    """The rows of all parts by step, and within a range of steps by pass; rows of one pass and step stay in their order.

    Each table is one row group: it ends where a step does, unless a step alone has more than ROW_GROUP_TOKENS; steps of less than `small`
    tokens share one. `room` is a
    folder for the buckets, which are removed. `advance` is told the rows read. Raises DamagedTrace.
    """
    for bounds in sweeps(parts):
        names = [room / f"{number}.arrow" for number in range(len(bounds) - 1)]
        _fill(store, table, parts, bounds, names, advance)
        for name in names:
            with pa.OSFile(str(name)) as file:
                rows = pa.ipc.open_stream(file).read_all()
            name.unlink()
            if rows.num_rows:
                yield from _row_groups(_in_order(rows), small)


def _fill(
    store: Store,
    table: Table,
    parts: Sequence[Part],
    bounds: list[int],
    names: list[Path],
    advance: Callable[[int], None],
) -> None:
    schema, edges = table.schema, np.array(bounds)
    with ExitStack() as stack:
        buckets = [stack.enter_context(pa.ipc.new_stream(str(name), schema, options=_OPTIONS)) for name in names]
        before, file = "", None
        for part in parts:
            first, last = np.searchsorted(part.steps, edges[[0, -1]])
            if first == last:
                continue
            if part.entry.relative != before:
                before, file = part.entry.relative, opened(store, part.entry)
            assert file is not None
            rows = read(store, part.entry, file, part.row_group)
            steps = np.asarray(rows["step"])
            for batch in rows.combine_chunks().to_batches():
                completed = table.completed(batch)
                assert completed is not None  # columns were compared when the trace was opened
                at = np.searchsorted(edges, np.asarray(completed["step"]), side="right") - 1
                for bucket in np.unique(at[(at >= 0) & (at < len(names))]).tolist():
                    buckets[bucket].write_batch(completed.filter(pa.array(at == bucket)))
            advance(int(np.count_nonzero((steps >= edges[0]) & (steps < edges[-1]))))


def _in_order(rows: pa.Table) -> pa.Table:
    """Rows by pass, where they have one, and step; sorting is stable."""
    keys = [("pass", "ascending")] if "pass" in rows.column_names else []
    return rows.take(pc.sort_indices(rows, [*keys, ("step", "ascending")]))


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
    """Positions at which a value is another one than the one before."""
    return [int(position) + 1 for position in np.flatnonzero(np.diff(np.asarray(values)))]
