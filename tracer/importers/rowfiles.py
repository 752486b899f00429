"""Find and read files with one row per sequence: Parquet and JSON."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import fsspec
import pyarrow.parquet as pq

from ...schemas.errors import ImportFailed
from ..store import file_system
from .rowbatch import ROWS_AT_ONCE, RowBatch, explained
from .textfiles import json_names, json_rows

METRICS = "metrics"
_READ = ".parquet, .jsonl or .json"


_PARQUET = (".parquet", ".pq")
_SUFFIXES = (*_PARQUET, ".jsonl", ".ndjson", ".json", ".jsonl.gz", ".ndjson.gz", ".json.gz")


def parquet_names(filesystem: fsspec.AbstractFileSystem, name: str) -> list[str]:
    """Return a Parquet file's column names, in file order. Raises ImportFailed."""
    with explained(name, "Parquet"), filesystem.open(name, "rb") as file:
        return list(pq.read_schema(file).names)


def parquet_rows(filesystem: fsspec.AbstractFileSystem, name: str, columns: Collection[str]) -> Iterator[RowBatch]:
    """Yield the rows of a Parquet file, with the requested columns that exist. Raises ImportFailed."""
    with explained(name, "Parquet"):
        size, first = int(filesystem.size(name) or 0), 1
        with filesystem.open(name, "rb") as file:
            parquet = pq.ParquetFile(file)
            present = [column for column in parquet.schema_arrow.names if column in columns]
            for batch in parquet.iter_batches(batch_size=ROWS_AT_ONCE, columns=present):
                yield RowBatch(
                    file=name,
                    columns={column: batch.column(batch.schema.get_field_index(column)) for column in present},
                    numbers=range(first, first + batch.num_rows),
                    num_bytes=size * batch.num_rows // max(parquet.metadata.num_rows, 1),
                )
                first += batch.num_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFiles:
    """The files found at one path, and the file system that holds them."""

    url: str
    filesystem: fsspec.AbstractFileSystem
    files: tuple[str, ...]
    metrics_files: tuple[str, ...]

    @classmethod
    def of(cls, url: str) -> RowFiles:
        """Find the files at a path, in a folder or by a pattern with `*`. Files named metrics.* are listed separately.

        Raises ImportFailed and StorageError.
        """
        filesystem, path = file_system(url)
        with explained(url, "a folder"):
            found = _found(filesystem, path.rstrip("/") or path, url)
        metrics = [name for name in found if _stem(name) == METRICS]
        files = [name for name in found if name not in metrics]
        if not files:
            raise ImportFailed(
                f"{url}: contains no {_READ} file; give the folder, the file itself, or a pattern with *"
            )
        unknown = next((name for name in found if not name.endswith(_SUFFIXES)), None)
        if unknown:
            raise ImportFailed(f"{unknown}: is not a {_READ} file; rename it if its content is")
        return cls(url=url, filesystem=filesystem, files=tuple(files), metrics_files=tuple(metrics))

    def size(self, name: str) -> int:
        """Return a file's size, bytes."""
        return int(self.filesystem.size(name) or 0)

    def names(self) -> dict[str, list[str]]:
        """Return file -> names of the file's columns."""
        return {
            name: (parquet_names if name.endswith(_PARQUET) else json_names)(self.filesystem, name)
            for name in self.files
        }

    def batches(self, columns: Collection[str]) -> Iterator[RowBatch]:
        """Yield the rows of all files, with the requested columns that each file has."""
        return self._rows(self.files, columns)

    def metrics(self, columns: Collection[str]) -> Iterator[RowBatch]:
        """Yield the rows of the metrics files."""
        return self._rows(self.metrics_files, columns)

    def _rows(self, files: Sequence[str], columns: Collection[str]) -> Iterator[RowBatch]:
        for name in files:
            yield from (parquet_rows if name.endswith(_PARQUET) else json_rows)(self.filesystem, name, columns)


def _found(filesystem: fsspec.AbstractFileSystem, path: str, url: str) -> Sequence[str]:
    if "*" in path:
        return sorted(filesystem.glob(path))
    if filesystem.isdir(path):
        names = sorted(str(name) for name in filesystem.ls(path, detail=False))
        return [name for name in names if name.endswith(_SUFFIXES) and not _base(name).startswith(".")]
    if filesystem.exists(path):
        return [path, *_beside(filesystem, path)]
    raise ImportFailed(f"{url}: not found; give a {_READ} file, or a folder of such files")


def _base(name: str) -> str:
    return name.rsplit("/", 1)[-1]


def _stem(name: str) -> str:
    return _base(name).split(".", 1)[0]


def _beside(filesystem: fsspec.AbstractFileSystem, path: str) -> list[str]:
    folder = path.rsplit("/", 1)[0] if "/" in path else ""
    beside = f"{folder}/{METRICS}.parquet" if folder else f"{METRICS}.parquet"
    return [beside] if beside != path and filesystem.exists(beside) else []
