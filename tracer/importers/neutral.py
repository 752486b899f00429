from __future__ import annotations

import os
import posixpath
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain

import fsspec
import pyarrow.parquet as pq

from ...schemas.errors import ImportFailed, option
from ...schemas.passes import LOGPROBS, ROLLOUT, TRAIN
from ...schemas.steps import ALL_STEPS, parse_steps
from ..progress import Progress, no_progress
from ..store import file_system
from .columns import (
    METRIC_KINDS,
    ROWS_AT_ONCE,
    Columns,
    RowBatch,
    Selection,
    explained,
    listed_names,
    map_example,
    shown_name,
)
from .metrics import SCALARS
from .row_import import KINDS, KNOWN, OF_PASSES, PASSES, REQUIRED, Imported, cannot_map, open_import
from .textfiles import json_names, json_rows


def import_parquet(
    path: str | os.PathLike[str],
    *,
    output: str | os.PathLike[str],
    map: Mapping[str, str] | None = None,
    steps: str = ALL_STEPS,
    sample: float = 1.0,
    force: bool = False,
    progress: Progress = no_progress,
) -> Imported:
    """Import Parquet or JSON files that use the trace's column names.

    `path` is a file, a folder or a glob pattern on any file system that fsspec supports. Files have one row per
    sequence. Required columns are `step`, `prompt_ids`, `response_ids` and at least one of `rollout_logprobs`,
    `train_logprobs`, `current_logprobs` and `reference_logprobs`. Optional columns are `entropy` and `top2_gap` (also
    for a single pass, such as `train_entropy`), a pass's policy version, its distributions and router choices (nested
    lists such as `train_topk_ids`), and all other arguments of Recorder.add_sequences. `advantage` is a number or a
    list, and `rewards` is a record of numbers. Lists are aligned with `response_ids`. If the folder has a
    `metrics.parquet` (`step`, `name`, `value`), it is read too. `map` maps the files' column names to the trace's. A
    column mapped to "" is skipped. `steps` (3:80, -10:) selects steps. `sample` selects a share of the sequences by
    hashing their names.

    Placeholders become NULL: -9999, 0.0 where the mask is 0, and lists that contain only 0.0. Such a list is kept if
    another pass also has logprobs near 0 for the same tokens (see ZeroLists).

    Raises ImportFailed, which names the file, column and row. An existing trace is then kept unchanged.
    """
    source = RowFiles.of(os.fspath(path))
    given = dict(map or {})
    files = source.names()
    every = list(dict.fromkeys(chain(*files.values())))
    _check_map(given, every, source.url)
    names = {file: _names_of(file, columns, given) for file, columns in files.items()}
    _check_columns(names, files, every, source.url)
    selection = Selection(steps=_chosen(source, names, steps), sample=sample)
    there = {theirs: ours for columns in names.values() for theirs, ours in columns.items()}
    scored = {OF_PASSES.get(ours) for ours in there.values()}
    passes = {column: name for column, name in PASSES.items() if name in scored}
    wanted = sorted(there, key=lambda theirs: KNOWN.index(there[theirs]))
    with open_import(output, "parquet", source.url, selection, ordered=False, grows=False, force=force) as rows:
        with progress("importing", sum(int(source.filesystem.size(name) or 0) for name in source.files)) as advance:
            for batch in source.rows(source.files, wanted):
                rows.add_rows(batch, names[batch.file], passes)
                advance(batch.num_bytes)
        rows.check_any()
        for batch in source.rows(source.metrics_files, METRIC_KINDS):
            rows.add_metrics(batch)
    lacking = [name for name in (ROLLOUT, TRAIN) if name not in rows.result.passes]
    spare = [name for name in every if name not in there and "logp" in name.replace("_", "").lower()]
    rows.result.notes += tuple(
        f"no {name} pass: if {shown_name(theirs)}, which was ignored, holds its logprobs, import again with "
        f"{option('map', f'{theirs}={name}{LOGPROBS}')} {option('force')}"
        for name, theirs in zip(lacking, spare, strict=False)
    )
    rows.result.ignored_columns = (*(name for name in every if name not in there), *rows.result.ignored_columns)
    return rows.result


def holds_rows(url: str, map: Mapping[str, str]) -> bool:
    """Return True if any table in a folder has a token or logprob column."""
    with suppress(ImportFailed):
        return any(map.get(name, name) in _TOKENS for name in chain(*RowFiles.of(url).names().values()))
    return False


def _chosen(source: RowFiles, names: Mapping[str, Mapping[str, str]], steps: str) -> frozenset[int] | None:
    if steps == ALL_STEPS:
        return None
    theirs = {column for columns in names.values() for column, ours in columns.items() if ours == "step"}
    there: set[int] = set()
    for batch in source.rows(source.files, theirs):
        columns = Columns.of(batch, names[batch.file], {"step": KINDS["step"]})
        there.update(columns.list("step") or ())
    return frozenset(parse_steps(steps, sorted(there), of=source.url))


def _check_columns(
    names: Mapping[str, Mapping[str, str]], files: Mapping[str, Sequence[str]], every: Sequence[str], where: str
) -> None:
    for file, columns in names.items():
        if every and not files[file]:
            continue  # an empty file, for example from a process without rows
        if lacking := [name for name in REQUIRED if name not in columns.values()]:
            is_curves = {*files[file]} & {*SCALARS.columns["step"]} and not {*_TOKENS} & {*columns.values()}
            remedy = (
                f". For curves without tokens: tim-trace import metrics {shlex.quote(file)} -o RUN" if is_curves else ""
            )
            example = map_example(lacking, [name for name in files[file] if name not in columns])
            raise ImportFailed(
                f"{file}: missing columns: {', '.join(lacking)} (found: {listed_names(files[file])}). Map "
                f"{'a column to it' if len(lacking) == 1 else 'columns to them'}, e.g. {example}{remedy}"
            )
    if not any(name in columns.values() for columns in names.values() for name in PASSES):
        raise ImportFailed(
            f"{where} has no logprobs (found: {listed_names(every)}). Map your column to "
            f"{' or '.join(PASSES)}, e.g. {map_example([next(iter(PASSES))], [])}"
        )


VALUES_AT_ONCE = 2 << 20
"""Maximum number of values in a block of rows, unless a single row has more."""
_TOKENS = ("prompt_ids", "response_ids", *PASSES)
METRICS = "metrics"
_READ = ".parquet, .jsonl or .json"


_PARQUET = (".parquet", ".pq")
_SUFFIXES = (*_PARQUET, ".jsonl", ".ndjson", ".json", ".jsonl.gz", ".ndjson.gz", ".json.gz")


def parquet_names(filesystem: fsspec.AbstractFileSystem, name: str) -> list[str]:
    with explained(name, "Parquet"), filesystem.open(name, "rb") as file:
        return list(pq.read_schema(file).names)


def parquet_rows(filesystem: fsspec.AbstractFileSystem, name: str, columns: Collection[str]) -> Iterator[RowBatch]:
    with explained(name, "Parquet"):
        size, first = int(filesystem.size(name) or 0), 1
        with filesystem.open(name, "rb") as file:
            # Save memory: pre_buffer would keep the whole file in memory, and without buffer_size, whole column chunks
            # would be read at once.
            parquet = pq.ParquetFile(file, buffer_size=1 << 20, pre_buffer=False)
            present = [column for column in parquet.schema_arrow.names if column in columns]
            for batch in parquet.iter_batches(batch_size=_rows_at_once(parquet.metadata, present), columns=present):
                yield RowBatch(
                    file=name,
                    columns={column: batch.column(batch.schema.get_field_index(column)) for column in present},
                    numbers=range(first, first + batch.num_rows),
                    num_bytes=size * batch.num_rows // max(parquet.metadata.num_rows, 1),
                )
                first += batch.num_rows


def _rows_at_once(metadata: pq.FileMetaData, columns: Sequence[str]) -> int:
    most = 1
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        chunks = map(group.column, range(group.num_columns))
        values = sum(each.num_values for each in chunks if each.path_in_schema.partition(".")[0] in columns)
        most = max(most, values // max(group.num_rows, 1))
    return min(ROWS_AT_ONCE, VALUES_AT_ONCE // most) or 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFiles:
    url: str
    filesystem: fsspec.AbstractFileSystem
    files: tuple[str, ...]
    metrics_files: tuple[str, ...]

    @classmethod
    def of(cls, url: str) -> RowFiles:
        filesystem, path = file_system(url)
        with explained(url, "a folder"):
            found = _found(filesystem, path.rstrip("/") or path, url)
        metrics = [name for name in found if posixpath.basename(name).split(".", 1)[0] == METRICS]
        files = [name for name in found if name not in metrics]
        if not files:
            raise ImportFailed(f"{url} contains no {_READ} file. Pass a folder, a single file, or a pattern with *")
        if unknown := next((name for name in found if not name.endswith(_SUFFIXES)), None):
            raise ImportFailed(
                f"{unknown} is not a {_READ} file. If its content is in one of these formats, change its suffix"
            )
        return cls(url=url, filesystem=filesystem, files=tuple(files), metrics_files=tuple(metrics))

    def names(self) -> dict[str, list[str]]:
        return {
            name: (parquet_names if name.endswith(_PARQUET) else json_names)(self.filesystem, name)
            for name in self.files
        }

    def rows(self, files: Sequence[str], columns: Collection[str]) -> Iterator[RowBatch]:
        for name in files:
            yield from (parquet_rows if name.endswith(_PARQUET) else json_rows)(self.filesystem, name, columns)


def _found(filesystem: fsspec.AbstractFileSystem, path: str, url: str) -> Sequence[str]:
    if "*" in path:
        return sorted(filesystem.glob(path))
    if filesystem.isdir(path):
        names = sorted(str(name) for name in filesystem.ls(path, detail=False))
        return [name for name in names if name.endswith(_SUFFIXES) and not posixpath.basename(name).startswith(".")]
    if filesystem.exists(path):
        beside = posixpath.join(posixpath.dirname(path), f"{METRICS}.parquet")
        return [path, beside] if beside != path and filesystem.exists(beside) else [path]
    raise ImportFailed(f"{url}: not found. Pass a {_READ} file, or a folder that contains one")


def parse_map(texts: Iterable[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in texts:
        theirs, equals, ours = text.rpartition("=")
        if not equals or not theirs:
            raise ImportFailed(f"got {text!r}, expected theirs=ours, e.g. completion_ids=response_ids", option="map")
        if found.setdefault(theirs, ours) != ours:
            raise ImportFailed(
                f"{theirs!r} is mapped to both {found[theirs]!r} and {ours!r}. Map it only once", option="map"
            )
    return found


def _check_map(given: Mapping[str, str], every: Sequence[str], where: str) -> None:
    for theirs, ours in given.items():
        if theirs not in every:
            raise ImportFailed(f"{where} has no column {theirs!r} (found: {listed_names(every)})", option="map")
        if ours and ours not in KNOWN:
            names = ", ".join(name for name in KNOWN if OF_PASSES.get(name, ROLLOUT) == ROLLOUT)
            raise cannot_map(
                theirs, ours, f"Known columns: {names}. The prefix rollout_ can also be train_, current_ or reference_"
            )


def _names_of(file: str, columns: Sequence[str], given: Mapping[str, str]) -> dict[str, str]:
    names: dict[str, str] = {}
    owner: dict[str, str] = {}
    for theirs in columns:
        ours = given.get(theirs, theirs)
        if ours not in KNOWN:
            continue
        if theirs in names:
            raise ImportFailed(f"{file} has two columns named {theirs!r}. Rename one")
        if ours in owner:
            spare = theirs if theirs == ours else owner[ours]
            raise ImportFailed(
                f"{file}: the columns {shown_name(owner[ours])} and {shown_name(theirs)} both map to {ours!r}. Skip "
                f"one with the mapping {spare}="
            )
        owner[ours], names[theirs] = theirs, ours
    return names
