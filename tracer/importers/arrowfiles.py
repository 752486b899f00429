"""Reading rows of Parquet and Arrow files, including those of Hugging Face datasets."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from .rowbatch import ROWS_AT_ONCE, RowBatch, explained


def parquet_names(filesystem: fsspec.AbstractFileSystem, name: str) -> list[str]:
    """Return a Parquet file's column names, in file order. Raises ImportFailed."""
    with explained(name, "Parquet"), filesystem.open(name, "rb") as file:
        return list(pq.read_schema(file).names)


def parquet_rows(filesystem: fsspec.AbstractFileSystem, name: str, columns: Collection[str]) -> Iterator[RowBatch]:
    """Yield the rows of a Parquet file, with the requested columns that exist. Raises ImportFailed."""
    with explained(name, "Parquet"):
        size = int(filesystem.size(name) or 0)
        with filesystem.open(name, "rb") as file:
            parquet = pq.ParquetFile(file)
            present = [column for column in parquet.schema_arrow.names if column in columns]
            batches = parquet.iter_batches(batch_size=ROWS_AT_ONCE, columns=present)
            yield from _row_batches(name, batches, present, size, parquet.metadata.num_rows)


def arrow_names(filesystem: fsspec.AbstractFileSystem, name: str) -> list[str]:
    """Return an Arrow file's column names, in file order. Raises ImportFailed."""
    with explained(name, "Arrow"), _arrow(filesystem, name) as (schema, _):
        return list(schema.names)


def arrow_rows(filesystem: fsspec.AbstractFileSystem, name: str, columns: Collection[str]) -> Iterator[RowBatch]:
    """Yield the rows of an Arrow IPC stream or file, with the requested columns that exist. Raises ImportFailed."""
    with explained(name, "Arrow"):
        size = int(filesystem.size(name) or 0)
        with _arrow(filesystem, name) as (schema, batches):
            present = [column for column in schema.names if column in columns]
            pieces = (
                batch.slice(start, ROWS_AT_ONCE)
                for batch in map(_validated, batches)
                for start in range(0, batch.num_rows, ROWS_AT_ONCE)
            )
            yield from _row_batches(name, pieces, present, size, None)


@contextmanager
def _arrow(filesystem: fsspec.AbstractFileSystem, name: str) -> Iterator[tuple[pa.Schema, Iterator[pa.RecordBatch]]]:
    """Yield the schema and batches of an IPC stream or an IPC file (Feather)."""
    with filesystem.open(name, "rb") as file:
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        if is_file:
            with pa.ipc.open_file(file) as reader:
                yield reader.schema, (reader.get_batch(index) for index in range(reader.num_record_batches))
        else:
            with pa.ipc.open_stream(file) as reader:
                yield reader.schema, iter(reader)


def _validated(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the batch after validating its offsets. Arrow does not validate them when it memory-maps a file."""
    batch.validate(full=True)
    return batch


def _row_batches(
    name: str, batches: Iterator[pa.RecordBatch], columns: list[str], size: int, num_rows: int | None
) -> Iterator[RowBatch]:
    """Yield batches as RowBatch, with their rows numbered.

    The size of a batch is its share of the file size or, if `num_rows` is None, its size in memory.
    """
    first = 1
    for batch in batches:
        arrays: dict[str, Any] = {column: batch.column(batch.schema.get_field_index(column)) for column in columns}
        yield RowBatch(
            file=name,
            columns=arrays,
            numbers=range(first, first + batch.num_rows),
            num_bytes=batch.nbytes if num_rows is None else size * batch.num_rows // max(num_rows, 1),
        )
        first += batch.num_rows
