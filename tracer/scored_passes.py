from __future__ import annotations

import os
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq

from ..schemas.errors import tell_damage
from ..schemas.layout import SCORES
from ..schemas.passes import REPLAY_PREFIX, STANDARD, TRAIN
from .snapshot import TableFile, take_snapshot
from .store import Store
from .verified_file import FileCursor


def replayed_pair(trace: str | os.PathLike[str], arm: str) -> str:
    """Return the pair that compares a replay with `train`, or with another standard pass if `train` has no logprobs."""
    names = scored_passes(trace)
    other = next((name for name in (TRAIN, *STANDARD) if name in names), TRAIN)
    return f"{REPLAY_PREFIX}{arm}:{other}"


def scored_passes(trace: str | os.PathLike[str]) -> list[str]:
    snapshot = take_snapshot(Store(trace))
    tell_damage(tuple(snapshot.damaged))
    entries = [entry for entry in snapshot.files[SCORES] if "logprobs" not in entry.lacking]
    found = {name for entry in entries for name in _of_file(entry)}
    if SCORES in snapshot.journals:
        found |= _of_rows(snapshot.journals[SCORES])
    return sorted(found)


def _of_file(entry: TableFile) -> Iterator[str]:
    file = pq.ParquetFile(pa.PythonFile(FileCursor(entry.file), mode="r"))
    columns = {file.metadata.schema.column(place).path: place for place in range(file.metadata.num_columns)}
    for number in range(file.num_row_groups):
        group = file.metadata.row_group(number)
        name = group.column(columns["pass"]).statistics
        scored = group.column(next(place for path, place in columns.items() if path.startswith("logprobs.")))
        knows = name is not None and name.has_min_max and name.min == name.max and scored.statistics is not None
        if knows and scored.num_values > scored.statistics.null_count:
            yield name.min
        else:
            yield from _of_rows(file.read_row_group(number, columns=["pass", "logprobs"], use_threads=False))


def _of_rows(rows: pa.Table) -> set[str]:
    return set(rows.filter(rows["logprobs"].is_valid())["pass"].unique().to_pylist())
