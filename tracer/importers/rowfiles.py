"""Find and read files with one row per sequence: Parquet, Arrow, JSON and CSV."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import fsspec

from ...schemas.errors import ImportFailed
from ..store import file_system
from .arrowfiles import arrow_names, arrow_rows, parquet_names, parquet_rows
from .rowbatch import RowBatch, explained
from .textfiles import csv_names, csv_rows, json_names, json_rows

METRICS = "metrics"
DATASET, SPLITS = "state.json", "dataset_dict.json"
"""Files that identify a folder written by `save_to_disk` of Hugging Face datasets."""
_READ = ".parquet, .jsonl, .json, .csv or .arrow"


@dataclass(frozen=True, slots=True)
class Format:
    """Readers for one file format, which is recognised by the file suffix."""

    suffixes: tuple[str, ...]
    names: Callable[[fsspec.AbstractFileSystem, str], list[str]]
    rows: Callable[[fsspec.AbstractFileSystem, str, Collection[str]], Iterator[RowBatch]]


FORMATS = (
    Format((".parquet", ".pq"), parquet_names, parquet_rows),
    Format((".jsonl", ".ndjson", ".json", ".jsonl.gz", ".ndjson.gz", ".json.gz"), json_names, json_rows),
    Format((".csv", ".csv.gz"), csv_names, csv_rows),
    Format((".arrow", ".feather"), arrow_names, arrow_rows),
)


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
            raise ImportFailed(f"{url}: holds no {_READ} file; name the folder or the file itself, or a pattern with *")
        unknown = next((name for name in found if format_of(name) is None), None)
        if unknown:
            raise ImportFailed(f"{unknown}: is not a {_READ} file; rename it if it has such content")
        return cls(url=url, filesystem=filesystem, files=tuple(files), metrics_files=tuple(metrics))

    def size(self, name: str) -> int:
        """Return a file's size, bytes."""
        return int(self.filesystem.size(name) or 0)

    def names(self) -> dict[str, list[str]]:
        """Return file -> names of the file's columns."""
        return {name: _known(name).names(self.filesystem, name) for name in self.files}

    def batches(self, columns: Collection[str]) -> Iterator[RowBatch]:
        """Yield the rows of all files, with the requested columns that each file has."""
        for name in self.files:
            yield from self.rows(name, columns)

    def rows(self, name: str, columns: Collection[str]) -> Iterator[RowBatch]:
        """Yield the rows of a file."""
        return _known(name).rows(self.filesystem, name, columns)

    def metrics(self, columns: Collection[str]) -> Iterator[RowBatch]:
        """Yield the rows of the metrics files."""
        for name in self.metrics_files:
            yield from _known(name).rows(self.filesystem, name, columns)


def format_of(name: str) -> Format | None:
    """Return a file's format, determined by the suffix; None if the suffix is unknown."""
    return next((format for format in FORMATS if name.endswith(format.suffixes)), None)


def _known(name: str) -> Format:
    format = format_of(name)
    assert format is not None
    return format


def _found(filesystem: fsspec.AbstractFileSystem, path: str, url: str) -> Sequence[str]:
    if "*" in path:
        return sorted(filesystem.glob(path))
    if filesystem.isdir(path):
        names = sorted(str(name) for name in filesystem.ls(path, detail=False))
        own = {_base(name) for name in names}
        if SPLITS in own:
            return _only_split(filesystem, path, url)
        if DATASET in own:
            return [*_dataset(filesystem, path, url), *(name for name in names if _stem(name) == METRICS)]
        return [name for name in names if format_of(name) and not _base(name).startswith(".")]
    if filesystem.exists(path):
        return [path, *_beside(filesystem, path)]
    raise ImportFailed(f"{url}: not found; name a {_READ} file, or a folder of them")


def _dataset(filesystem: fsspec.AbstractFileSystem, path: str, url: str) -> list[str]:
    """List the Arrow files in a folder written by `Dataset.save_to_disk`, in row order."""
    try:
        state = json.loads(filesystem.cat_file(f"{path}/{DATASET}"))
        names = [entry["filename"] for entry in state["_data_files"]]
    except (ValueError, LookupError, TypeError) as error:
        raise ImportFailed(f"{url}/{DATASET}: does not list the files of a dataset ({error!r})") from error
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise ImportFailed(f"{url}: its rows are selected by an index; call flatten_indices() and save_to_disk again")
    strange = next((name for name in names if not isinstance(name, str) or _base(name) != name), None)
    if strange is not None:
        raise ImportFailed(f"{url}/{DATASET}: lists {strange!r}, which is not a file name in that folder")
    return [f"{path}/{name}" for name in names]


def _only_split(filesystem: fsspec.AbstractFileSystem, path: str, url: str) -> list[str]:
    """List the files in a folder written by `DatasetDict.save_to_disk`, which must have exactly one split."""
    try:
        splits = list(json.loads(filesystem.cat_file(f"{path}/{SPLITS}"))["splits"])
    except (ValueError, LookupError, TypeError) as error:
        raise ImportFailed(f"{url}/{SPLITS}: does not list the splits of a dataset ({error!r})") from error
    if len(splits) != 1 or not isinstance(splits[0], str) or _base(splits[0]) != splits[0]:
        named = " or ".join(f"{url.rstrip('/')}/{split}" for split in splits)
        raise ImportFailed(f"{url}: holds {len(splits)} splits; name one of them: {named or 'none found'}")
    return _dataset(filesystem, f"{path}/{splits[0]}", f"{url.rstrip('/')}/{splits[0]}")


def _base(name: str) -> str:
    return name.rsplit("/", 1)[-1]


def _stem(name: str) -> str:
    return _base(name).split(".", 1)[0]


def _beside(filesystem: fsspec.AbstractFileSystem, path: str) -> list[str]:
    folder = path.rsplit("/", 1)[0] if "/" in path else ""
    beside = f"{folder}/{METRICS}.parquet" if folder else f"{METRICS}.parquet"
    return [beside] if beside != path and filesystem.exists(beside) else []
