"""The neutral way in: one row a sequence, with the names of the trace's own columns."""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ... import __version__
from ...schemas.capture import Capture
from ...schemas.clock import now
from ...schemas.errors import ImportFailed, InvalidRecord
from ...schemas.manifest import Manifest
from ...schemas.passes import CURRENT, REFERENCE, ROLLOUT, TRAIN
from ..create import new_trace
from ..progress import Progress, no_progress
from ..ragged import Ragged
from ..recorder import Recorder
from ..writer import TraceWriter
from .placeholders import Placeholders
from .rowfiles import RowFiles

PASSES = {
    "rollout_logprobs": ROLLOUT,
    "train_logprobs": TRAIN,
    "current_logprobs": CURRENT,
    "reference_logprobs": REFERENCE,
}
"""Column -> the pass that it gives."""

REQUIRED = ("step", "prompt_ids", "response_ids")
PER_ROW = ("reward", "temperature", "top_p", "top_k", "policy_version", "finish_reason")
OPTIONAL = ("seq_id", "group_id", "response_mask", "entropy", "advantage", *PER_ROW)
KNOWN = (*REQUIRED, *PASSES, *OPTIONAL)


@dataclass(slots=True, kw_only=True)
class Imported:
    """What an import brought in."""

    folder: Path
    num_sequences: int = 0
    num_tokens: int = 0
    """Response tokens."""
    num_metrics: int = 0
    passes: tuple[str, ...] = ()
    placeholders: Placeholders = field(default_factory=Placeholders)
    num_above_zero: int = 0
    """Logprobs above 0, kept as they are: they are no log-probabilities."""
    ignored_columns: tuple[str, ...] = ()


def import_parquet(
    path: str | os.PathLike[str],
    *,
    output: str | os.PathLike[str],
    force: bool = False,
    progress: Progress = no_progress,
) -> Imported:
    """Make a trace of Parquet files, or of JSON lines with the same names.

    One row a sequence: `step`, `prompt_ids`, `response_ids` and at least one of `rollout_logprobs`, `train_logprobs`,
    `current_logprobs` and `reference_logprobs`; optionally `seq_id`, `group_id`, `response_mask`, `entropy`, `reward`,
    `advantage` (a number or a list), `temperature`, `top_p`, `top_k`, `policy_version` and `finish_reason`. Lists are
    aligned with `response_ids`. A `metrics.parquet` (`step`, `name`, `value`) beside them is read too. `path` is a
    file, a folder or a pattern, on any file system that fsspec knows.

    Placeholders become NULL: -9999, 0.0 where the mask is 0, and lists of two or more that hold nothing but 0.0.
    Raises ImportFailed, naming file and sequence, and leaves nothing at `output` then.
    """
    source = RowFiles.of(os.fspath(path))
    columns = source.columns()
    _check_columns(columns, source.url)
    manifest = Manifest(
        run_id=str(uuid.uuid4()), created_at=now(), created_by=__version__, source=f"import parquet {source.url}"
    )
    with new_trace(output, manifest, force=force) as folder:
        return _import(source, columns, folder, progress)


def _import(source: RowFiles, columns: list[str], folder: Path, progress: Progress) -> Imported:
    result = Imported(
        folder=folder,
        passes=tuple(name for column, name in PASSES.items() if column in columns),
        ignored_columns=tuple(name for name in columns if name not in KNOWN),
    )
    with Recorder.of_writer(TraceWriter(folder), Capture(), ordered=False) as recorder:
        for name in result.passes:
            recorder.add_contract(name, {"engine": None, "source": "import parquet", "path": source.url})
        with progress("importing", source.num_bytes) as advance:
            for rows, num_bytes, where in source.batches([name for name in KNOWN if name in columns]):
                try:
                    _add_rows(recorder, _Columns(rows), result)
                except (InvalidRecord, pa.ArrowException) as error:
                    raise ImportFailed(f"{where}: {error}") from error
                advance(num_bytes)
        for metrics in source.metrics():
            _add_metrics(recorder, metrics, result, source.metrics_files[0])
    return result


def _check_columns(columns: Sequence[str], where: str) -> None:
    lacking = [name for name in REQUIRED if name not in columns]
    if lacking:
        raise ImportFailed(
            f"{where}: lacks the columns {', '.join(lacking)} (found: {', '.join(columns) or 'none'}); rename yours to "
            f"{', '.join(REQUIRED)}"
        )
    if not any(name in columns for name in PASSES):
        raise ImportFailed(
            f"{where}: has no logprobs (found: {', '.join(columns)}); rename yours to {' or '.join(PASSES)}"
        )


class _Columns:
    """Some rows' columns, as Arrow arrays; a column that is not there is None."""

    def __init__(self, values: dict[str, Any]):
        self._arrays = {name: _array(name, value) for name, value in values.items()}

    def __getitem__(self, name: str) -> pa.Array | None:
        return self._arrays.get(name)

    def take(self, rows: pa.Array) -> _Columns:
        part = _Columns({})
        part._arrays = {name: array.take(rows) for name, array in self._arrays.items()}
        return part

    def steps(self) -> list[tuple[int, pa.Array]]:
        """Each step and its rows, in the order in which the steps come."""
        step = self._arrays["step"]
        if step.null_count:
            raise InvalidRecord("a row has no step; every sequence belongs to one")
        steps = step.cast(pa.int64())
        return [
            (value, pc.indices_nonzero(pc.equal(steps, value)).cast(pa.int64()))
            for value in pc.unique(steps).to_pylist()
        ]

    def ragged(self, name: str, type: pa.DataType) -> Ragged | None:
        """A list column as flat values; NULL lists are empty."""
        array = self[name]
        if array is None:
            return None
        if not pa.types.is_list(array.type):
            raise InvalidRecord(f"column {name!r} holds {array.type}, where each row needs a list of {type}")
        lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False).astype(np.int64)
        values = _cast(pc.list_flatten(array), type, name)
        valid = None if not values.null_count else values.is_valid().to_numpy(zero_copy_only=False)
        filled = values if valid is None else pc.fill_null(values, pa.scalar(0).cast(type))
        return Ragged(filled.to_numpy(zero_copy_only=False), lengths, valid)


def _array(name: str, value: Any) -> pa.Array:
    if isinstance(value, pa.Array):
        if pa.types.is_large_list(value.type) or pa.types.is_fixed_size_list(value.type):
            return value.cast(pa.list_(value.type.value_type))
        return value
    try:
        return pa.array(value)
    except pa.ArrowException as error:
        raise InvalidRecord(f"column {name!r} mixes kinds of values: {error}") from error


def _cast(values: pa.Array, type: pa.DataType, name: str) -> pa.Array:
    try:
        # float64 narrows to float32, which is what frameworks hold; nothing else may change a value.
        return values.cast(type, safe=not pa.types.is_floating(type))
    except pa.ArrowException as error:
        raise InvalidRecord(f"column {name!r} does not read as lists of {type}: {error}") from error


def _add_rows(recorder: Recorder, columns: _Columns, result: Imported) -> None:
    for step, rows in columns.steps():
        _add_step(recorder, step, columns.take(rows), result)


def _add_step(recorder: Recorder, step: int, columns: _Columns, result: Imported) -> None:
    response_ids = columns.ragged("response_ids", pa.int32())
    assert response_ids is not None
    seq_ids = columns["seq_id"]
    mask = columns.ragged("response_mask", pa.bool_())
    advantage = columns["advantage"]
    per_token = advantage is not None and bool(pa.types.is_list(advantage.type))
    per_row: dict[str, Any] = {name: _values(columns[name]) for name in PER_ROW}
    batch = recorder.add_sequences(
        step=step,
        seq_ids=[str(result.num_sequences + row) for row in range(len(response_ids))]
        if seq_ids is None
        else seq_ids.to_pylist(),
        group_ids=None if columns["group_id"] is None else columns["group_id"].to_pylist(),
        prompt_ids=columns.ragged("prompt_ids", pa.int32()),
        response_ids=response_ids,
        response_mask=mask,
        advantage=columns.ragged("advantage", pa.float32()) if per_token else _values(advantage),
        **per_row,
    )
    result.num_sequences += len(response_ids)
    result.num_tokens += len(response_ids.values)
    entropy_of = next((name for name in (TRAIN, CURRENT, ROLLOUT) if name in result.passes), None)
    for column, pass_name in PASSES.items():
        array = columns[column]
        if array is None:
            continue
        present = pc.indices_nonzero(array.is_valid()).cast(pa.int64())
        part = columns.take(present)
        logprobs = part.ragged(column, pa.float32())
        assert logprobs is not None
        part_mask = part.ragged("response_mask", pa.bool_())
        fits = part_mask is not None and np.array_equal(part_mask.lengths, logprobs.lengths)
        logprobs = result.placeholders.clean(logprobs, part_mask if fits else None)
        result.num_above_zero += int((logprobs.values > 0).sum())
        if len(logprobs):
            recorder.add_scores(
                pass_name,
                batch,
                rows=present.to_numpy(zero_copy_only=False),
                logprobs=logprobs,
                entropy=part.ragged("entropy", pa.float32()) if pass_name == entropy_of else None,
            )


def _values(array: pa.Array | None) -> list[Any] | None:
    return None if array is None else array.to_pylist()


def _add_metrics(recorder: Recorder, rows: list[dict[str, Any]], result: Imported, where: str) -> None:
    by_step: dict[int, dict[str, Any]] = {}
    for row in rows:
        if not {"step", "name", "value"} <= set(row):
            raise ImportFailed(f"{where}: has the columns {', '.join(row)}; metrics need step, name and value")
        by_step.setdefault(int(row["step"]), {})[str(row["name"])] = row["value"]
    for step, values in by_step.items():
        recorder.add_metrics(step, values)
        result.num_metrics += len(values)
