from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ..schemas.checksums import SealedFile
from ..schemas.documents import WriterState
from ..schemas.errors import DamagedTrace
from ..schemas.layout import EVAL_SCORES, JOURNAL, SCORES, WRITERS, Segment
from ..schemas.tables import FLOATS, TOKENS
from ..schemas.tables import TABLES as TABLE_SPECS
from . import dense
from .create import remove_unfinished
from .journal import DENSE_TABLE, JOURNALED, read_journal
from .liveness import journaled_segments, liveness
from .parquet_file import write_checked
from .store import Store
from .whole_file import alone, check_no_links, remove_temporaries, trace_file, write_part

ROW_GROUP_TOKENS = 1 << 20
"""Maximum number of response tokens per row group. Scans load whole row groups and skip those of other steps."""

COMPRESSION = "zstd"
COMPRESSION_LEVEL = 1
_SAMPLED = 1 << 16
"""Number of values to compress per column when choosing its encoding."""


def seal_table(folder: Path, segment: Segment, table: str) -> dict[str, SealedFile]:
    """Write a closed journal as Parquet, or as Zarr for distributions. Returns SealedFiles by path.

    The journal is kept until the writer's state lists its replacement. If the process is killed before that, both
    exist: readers then use the journal, and sealing again writes the same file.
    """
    content = read_journal(Store(folder), segment, table)
    if content.damage is not None:
        raise DamagedTrace(f"{folder / segment.journal(table)}: {content.damage}")
    return seal_rows(folder, segment, table, content.batches)


def seal_rows(folder: Path, segment: Segment, table: str, rows: Sequence[pa.RecordBatch]) -> dict[str, SealedFile]:
    batches = [batch for batch in rows if batch.num_rows]
    if not batches:
        return {}
    if table == DENSE_TABLE:
        target = folder / segment.dense
        if target.exists():  # a process that was killed while sealing left these files
            shutil.rmtree(target)
        with trace_file(folder, segment.dense) as temporary:
            root = dense.write_group(temporary, segment, batches)
        return {f"{segment.dense}/zarr.json": root}
    relative = segment.parquet(table)
    with trace_file(folder, relative) as temporary:
        return {relative: write_parquet(temporary, relative, table, batches)}


def write_parquet(path: Path, relative: str, table: str, batches: list[pa.RecordBatch]) -> SealedFile:
    """Write a table. Scores are grouped by pass. `relative` is the file's final path in the trace."""
    parts = _by_pass(batches) if table in (SCORES, EVAL_SCORES) else [pa.Table.from_batches(batches)]
    groups = (
        part.slice(start, stop - start)
        for part in parts
        for start, stop in row_group_bounds(response_lengths(part), ROW_GROUP_TOKENS)
    )
    return write_checked(path, relative, TABLE_SPECS[table].schema, groups, **parquet_options(table, parts[0]))


def parquet_options(table: str, sample: pa.Table, *, splits_ids: bool = False) -> dict[str, Any]:
    """Return ParquetWriter options.

    A float column is encoded with BYTE_STREAM_SPLIT if that makes its values in `sample` compress better, as is usual
    unless values repeat (near-certain tokens, shared prefixes). With `splits_ids`, token id columns use it too.

    Only integer and text columns get statistics. Float statistics omit NaN, so DuckDB would conclude from them that
    `isnan(reward)` is always false.
    """
    columns = TABLE_SPECS[table].columns
    encodings = {
        f"{column.name}.list.element": "BYTE_STREAM_SPLIT"
        for column in columns
        if (column.type == FLOATS and _is_smaller_split(sample[column.name])) or (splits_ids and column.type == TOKENS)
    }
    return {
        "compression": COMPRESSION,
        "compression_level": COMPRESSION_LEVEL,
        "write_statistics": [column.name for column in columns if column.type in (pa.int64(), pa.int32(), pa.string())],
        "use_dictionary": [column.name for column in columns if column.repeats],
        "column_encoding": encodings or None,
        "write_batch_size": 1 << 16,
    }


def _is_smaller_split(lists: pa.ChunkedArray) -> bool:
    values = [chunk.flatten()[:_SAMPLED].drop_null().to_numpy(zero_copy_only=False) for chunk in lists.chunks]
    sample = np.concatenate([*values, np.empty(0, np.float32)])[:_SAMPLED]
    codec = pa.Codec(COMPRESSION, COMPRESSION_LEVEL)
    plain, split = (
        codec.compress(part.tobytes(), asbytes=True) for part in (sample, sample.view(np.uint8).reshape(-1, 4).T)
    )
    return len(split) <= len(plain)


def row_group_bounds(lengths: np.ndarray, limit: int) -> Iterator[tuple[int, int]]:
    """Yield row ranges with at most `limit` tokens each. A row with more tokens gets its own range.

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


def response_lengths(rows: pa.Table) -> np.ndarray:
    import pyarrow.compute as pc  # imported here, because it takes 60 ms and `tim-trace record` rarely needs it

    for name in ("logprobs", "response_ids"):
        if name in rows.column_names:
            return np.asarray(pc.fill_null(pc.list_value_length(rows[name]), 0))
    return np.zeros(rows.num_rows, dtype=np.int64)


def adopt(folder: Path) -> None:
    """Seal dead writers' journals. A segment that cannot be sealed stays readable in its journal."""
    check_no_links(folder)
    store = Store(folder)
    with alone(folder):
        states, damaged = store.writers()
        dead = [state for state in states if not liveness(state, store).is_alive]
        for state in dead:
            for segment in journaled_segments(store):
                if segment.writer == state.writer:
                    with contextlib.suppress(OSError, DamagedTrace):
                        _adopt(folder, segment, state)
        if len(dead) == len(states) and not damaged:
            remove_temporaries(folder)
            remove_unfinished(folder)
            with contextlib.suppress(OSError):  # the folder holds a file that tim-trace did not write
                (folder / JOURNAL).rmdir()


def _adopt(folder: Path, segment: Segment, state: WriterState) -> None:
    store, tables = Store(folder), journaled_segments(Store(folder)).get(segment, ())
    torn = {segment.journal(table): read_journal(store, segment, table).torn_bytes for table in tables}
    files = {name: file for table in tables for name, file in seal_table(folder, segment, table).items()}
    journals = [segment.journal(table) for table in JOURNALED]
    state.files |= files
    state.torn_journals |= {name: num_bytes for name, num_bytes in torn.items() if num_bytes}
    state.journals = tuple(name for name in state.journals if name not in journals)
    write_part(folder, f"{WRITERS}/{state.writer}.json", state.to_json().encode())
    for name in journals:
        (folder / name).unlink(missing_ok=True)
