"""Sealing: turn a segment's journal into Parquet and Zarr, then drop the journal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ..schemas.layout import SCORES, Segment
from ..schemas.tables import TABLES as TABLE_SPECS
from . import dense
from .journal import DENSE_TABLE, JOURNALED, read_journal
from .store import Store, whole_file

ROW_GROUP_TOKENS = 1 << 20
"""Response tokens a row group: a scan holds one row group's lists at a time, and prunes by step in such units."""

COMPRESSION = "zstd"
COMPRESSION_LEVEL = 1
_SPLIT_FLOATS = ("logprobs", "entropy", "top2_gap", "advantages")
_REPEATED_TEXT = ("pass", "contract", "writer", "finish_reason", "group_id", "dense", "name")


def seal(folder: Path, segment: Segment) -> None:
    """Seal every table of a segment."""
    for table in JOURNALED:
        seal_table(folder, segment, table)


def seal_table(folder: Path, segment: Segment, table: str) -> None:
    """Write a closed journal as Parquet, or Zarr for distributions, and remove it.

    A process killed in between leaves a journal beside its sealed file; readers take the sealed one, and sealing again
    ends in the same files. Each file appears whole, by rename.
    """
    journal = folder / segment.journal(table)
    target = folder / (segment.dense if table == DENSE_TABLE else segment.parquet(table))
    if not journal.exists():
        return
    if not target.exists():
        batches = [batch for batch in read_journal(Store(folder), segment, table).batches if batch.num_rows]
        if batches:
            with whole_file(target) as temporary:
                if table == DENSE_TABLE:
                    dense.write_group(temporary, batches)
                else:
                    write_parquet(temporary, table, batches)
    journal.unlink()


def write_parquet(path: Path, table: str, batches: list[pa.RecordBatch]) -> None:
    """Write rows of a table of the trace with its encodings, in row groups of about a million response tokens.

    Scores are grouped by pass, so that a query of two passes leaves the others' bytes alone; each of their batches
    holds one pass.
    """
    schema = TABLE_SPECS[table].schema
    names = set(schema.names)
    encodings = {f"{name}.list.element": "BYTE_STREAM_SPLIT" for name in _SPLIT_FLOATS if name in names}
    with pq.ParquetWriter(
        path,
        schema,
        compression=COMPRESSION,
        compression_level=COMPRESSION_LEVEL,
        use_dictionary=[name for name in _REPEATED_TEXT if name in names],
        column_encoding=encodings or None,
        write_batch_size=1 << 16,
    ) as writer:
        for part in _by_pass(batches) if table == SCORES else [pa.Table.from_batches(batches)]:
            for start, stop in row_group_bounds(_response_lengths(part), ROW_GROUP_TOKENS):
                writer.write_table(part.slice(start, stop - start), row_group_size=stop - start)


def row_group_bounds(lengths: np.ndarray, limit: int) -> Iterator[tuple[int, int]]:
    """Cut rows into runs of at most `limit` tokens; a single longer row is a run of its own.

    >>> import numpy as np
    >>> list(row_group_bounds(np.array([4, 4, 4, 9, 1]), limit=8))
    [(0, 2), (2, 3), (3, 4), (4, 5)]
    """
    ends = np.cumsum(lengths)
    start = 0
    while start < len(lengths):
        before = ends[start - 1] if start else 0
        stop = max(int(np.searchsorted(ends, before + limit, side="right")), start + 1)
        yield start, stop
        start = stop


def _by_pass(batches: list[pa.RecordBatch]) -> list[pa.Table]:
    parts: dict[str, list[pa.RecordBatch]] = {}
    for batch in batches:
        parts.setdefault(batch["pass"][0].as_py(), []).append(batch)
    return [pa.Table.from_batches(parts[name]) for name in sorted(parts)]


def _response_lengths(rows: pa.Table) -> np.ndarray:
    for name in ("logprobs", "response_ids"):
        if name in rows.column_names:
            return np.asarray(pc.fill_null(pc.list_value_length(rows[name]), 0))
    return np.zeros(rows.num_rows, dtype=np.int64)
