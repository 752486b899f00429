"""Reading files of one row a sequence, Parquet or JSON lines, a few hundred rows at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from ...schemas.errors import ImportFailed

ROWS_AT_ONCE = 512
METRICS = "metrics"
_PARQUET = (".parquet", ".pq")
_JSON_LINES = (".jsonl", ".ndjson", ".json", ".jsonl.gz", ".ndjson.gz", ".json.gz")


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFiles:
    """The files below one path, and the file system that they lie on."""

    url: str
    filesystem: fsspec.AbstractFileSystem
    files: tuple[str, ...]
    metrics_files: tuple[str, ...]

    @classmethod
    def of(cls, url: str) -> RowFiles:
        """Find the files at a path, a folder or a pattern with `*`; those called metrics.* stand apart."""
        filesystem, path = fsspec.core.url_to_fs(url)
        if "*" in path:
            found = sorted(filesystem.glob(path))
        elif filesystem.isdir(path):
            found = sorted(name for name in filesystem.ls(path, detail=False) if _format(name))
        elif filesystem.exists(path):
            found = [path, *_beside(filesystem, path)]
        else:
            raise ImportFailed(f"{url}: nothing is there; name a Parquet file, a folder of them, or JSON lines")
        metrics = [name for name in found if _stem(name) == METRICS]
        files = [name for name in found if name not in metrics]
        if not files:
            raise ImportFailed(f"{url}: holds no .parquet or .jsonl file; name the folder or the file itself")
        unknown = next((name for name in files if not _format(name)), None)
        if unknown:
            raise ImportFailed(f"{unknown}: is neither .parquet nor .jsonl; rename it to what it is")
        return cls(url=url, filesystem=filesystem, files=tuple(files), metrics_files=tuple(metrics))

    @property
    def num_bytes(self) -> int:
        return sum(int(self.filesystem.size(name) or 0) for name in self.files)

    def columns(self) -> list[str]:
        """Names of the columns that the files have, each once."""
        names: dict[str, None] = {}
        for name in self.files:
            if _format(name) == "parquet":
                with self.filesystem.open(name, "rb") as file, _explained(name):
                    names |= dict.fromkeys(pq.read_schema(file).names)
            else:
                for rows, _ in self._json_rows(name):
                    names |= {key: None for row in rows for key in row}
        return list(names)

    def batches(self, columns: list[str]) -> Iterator[tuple[dict[str, list[Any] | pa.Array], int, str]]:
        """Give columns of some rows, the file's bytes that they took, and where they are."""
        for name in self.files:
            if _format(name) == "parquet":
                yield from self._parquet_batches(name, columns)
            else:
                for rows, num_bytes in self._json_rows(name):
                    present = [column for column in columns if any(column in row for row in rows)]
                    yield {column: [row.get(column) for row in rows] for column in present}, num_bytes, name

    def metrics(self) -> Iterator[list[dict[str, Any]]]:
        """Give the rows of the metrics files."""
        for name in self.metrics_files:
            if _format(name) == "parquet":
                with self.filesystem.open(name, "rb") as file, _explained(name):
                    for batch in pq.ParquetFile(file).iter_batches(batch_size=65536):
                        yield batch.to_pylist()
            else:
                for rows, _ in self._json_rows(name):
                    yield rows

    def _parquet_batches(self, name: str, columns: list[str]) -> Iterator[tuple[dict[str, Any], int, str]]:
        size = int(self.filesystem.size(name) or 0)
        with self.filesystem.open(name, "rb") as file, _explained(name):
            parquet = pq.ParquetFile(file)
            present = [column for column in columns if column in parquet.schema_arrow.names]
            total = max(parquet.metadata.num_rows, 1)
            for batch in parquet.iter_batches(batch_size=ROWS_AT_ONCE, columns=present):
                yield {column: batch[column] for column in present}, size * batch.num_rows // total, name

    def _json_rows(self, name: str) -> Iterator[tuple[list[dict[str, Any]], int]]:
        rows: list[dict[str, Any]] = []
        num_bytes = 0
        with self.filesystem.open(name, "rb", compression="infer") as file:
            for number, line in enumerate(file, start=1):
                num_bytes += len(line)
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise ImportFailed(f"{name}, line {number}: not JSON ({error}); each line is one object") from error
                if not isinstance(row, dict):
                    raise ImportFailed(
                        f'{name}, line {number}: is no object; each line is one sequence, as {{"step": 1}}'
                    )
                rows.append(row)
                if len(rows) == ROWS_AT_ONCE:
                    yield rows, num_bytes
                    rows, num_bytes = [], 0
        if rows:
            yield rows, num_bytes


class _explained:
    """Name the file in an error of the Parquet reader."""

    def __init__(self, name: str):
        self._name = name

    def __enter__(self) -> None: ...

    def __exit__(self, _type: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, (pa.ArrowException, OSError)) and not isinstance(error, ImportFailed):
            raise ImportFailed(f"{self._name}: not readable as Parquet ({str(error).splitlines()[0]})") from error


def _format(name: str) -> str | None:
    if name.endswith(_PARQUET):
        return "parquet"
    return "json" if name.endswith(_JSON_LINES) else None


def _stem(name: str) -> str:
    return name.rsplit("/", 1)[-1].split(".", 1)[0]


def _beside(filesystem: fsspec.AbstractFileSystem, path: str) -> list[str]:
    folder = path.rsplit("/", 1)[0] if "/" in path else ""
    beside = f"{folder}/{METRICS}.parquet" if folder else f"{METRICS}.parquet"
    return [beside] if beside != path and filesystem.exists(beside) else []
