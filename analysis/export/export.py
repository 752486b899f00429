"""The way out of a trace: its sequences or its figures in the files of other tools."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from ...schemas.errors import InvalidOption, NotInstalled
from ...schemas.layout import METRICS, SEQUENCES
from ...schemas.results import Result
from ...schemas.steps import ALL_STEPS
from ...tracer.progress import Progress, no_progress
from ...tracer.whole_file import whole_file
from ..report.targets import explained, local, refuse
from ..trace.database import Database
from ..trace.pairs import parse_pair
from ..trace.source import Pair
from .event_file import NAME, write_events
from .json_lines import write_lines
from .mlflow_run import NAME as MLFLOW_NAME
from .mlflow_run import write_mlflow
from .sequences import metric_batches, sequence_tables
from .series import StepFigures, num_texts, settings_of, step_figures
from .wandb_run import write_wandb

PARQUET, JSONL, TENSORBOARD, WANDB, MLFLOW = "parquet", "jsonl", "tensorboard", "wandb", "mlflow"
FORMATS = (PARQUET, JSONL, TENSORBOARD, WANDB, MLFLOW)
_GROWING = {WANDB: write_wandb, MLFLOW: write_mlflow}
"""Formats to which a further run is added -> what writes one."""

_Write = Callable[[Path, Iterator[pa.Table | pa.RecordBatch]], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported(Result):
    """What was written."""

    _text = "tim_trace.analysis.export.text:exported_text"

    format: str
    output: str
    """The folder."""
    files: tuple[str, ...]
    """Names in the folder; of wandb the folder of its run."""
    num_sequences: int
    """0 where figures were written."""
    num_values: int
    """Numbers of steps, or logged values beside the sequences."""
    num_texts: int
    """Logged values that are no numbers, and so in no series."""


def export_run(
    trace: str | os.PathLike[str],
    *,
    to: str,
    output: str | os.PathLike[str],
    pair: str = "train:rollout",
    steps: str = ALL_STEPS,
    force: bool = False,
    progress: Progress = no_progress,
) -> Exported:
    """Write a run's sequences, or its figures by step, as files of another tool.

    `to` parquet or jsonl: `sequences`, one row a sequence with token ids, mask, rewards, advantages, sampling settings, the
    logprobs of every pass (`PASS_logprobs`, nats; of `current` those of the first iteration) and `d`, which is
    logprob(a) - logprob(b) of `pair` for every response token, NULL where either is; and `metrics`, what was logged. `import
    parquet` reads both. `to` tensorboard, wandb or mlflow: the columns of `pair_steps` as `a-b/NAME` and every logged number under its
    own name, in double precision; wandb's run is written offline, with the hyperparameters as its config, and mlflow's to the SQLite
    file mlflow.db, with them as its parameters.

    `output` is a folder, which is made. `steps` (3:80, -10:) takes a part of the run. Some steps are in memory at a time. Files
    that lie there are replaced with `force` alone; a run of wandb or mlflow is always a new one.

    Raises InvalidOption, FileThere, StorageError, NotInstalled where the tool's library is missing, TraceNotFound, NewerTrace
    or DamagedTrace.
    """
    if to not in FORMATS:
        raise InvalidOption(f"got {to!r}; use {', '.join(FORMATS)}", option="to")
    names, folder = parse_pair(pair), local(output)
    files = {
        PARQUET: (f"{SEQUENCES}.parquet", f"{METRICS}.parquet"), JSONL: (f"{SEQUENCES}.jsonl", f"{METRICS}.jsonl"),
        TENSORBOARD: (NAME,), WANDB: ("wandb",), MLFLOW: (MLFLOW_NAME,),
    }[to]  # fmt: skip
    if to not in _GROWING:
        refuse([folder / name for name in files], force)
    database = Database(trace, steps)
    num_sequences = num_values = texts = 0
    with explained(output), database.telling(progress):
        if to in (PARQUET, JSONL):
            write = _write_parquet if to == PARQUET else write_lines
            num_sequences = _written(
                folder / files[0], _counted(sequence_tables(database, names), database, progress), write
            )
            num_values = _written(folder / files[1], metric_batches(database), write)
        else:
            num_values, texts = _write_figures(to, folder, database, names), num_texts(database)
    return Exported(
        format=to, output=os.fspath(output), files=files, num_sequences=num_sequences, num_values=num_values,
        num_texts=texts,
    )  # fmt: skip


def _write_figures(to: str, folder: Path, database: Database, pair: Pair) -> int:
    figures: Iterator[StepFigures] = step_figures(database, pair)
    with _installed(to):
        if to in _GROWING:
            return _GROWING[to](folder, database.sources[0].run, settings_of(database), figures)
        with whole_file(folder / NAME) as path:
            return write_events(path, figures)


@contextmanager
def _installed(library: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise NotInstalled(f"export: needs {library}, which is not installed; pip install {library}") from error


def _counted(tables: Iterator[pa.Table], database: Database, progress: Progress) -> Iterator[pa.Table]:
    """Tell a progress of the sequences as they are written."""
    ((total,),) = database.connection.execute("SELECT count(*) FROM sequences").fetchall()
    with progress("exporting", total) as advance:
        for table in tables:
            yield table
            advance(table.num_rows)


def _written(path: Path, rows: Iterator[pa.Table | pa.RecordBatch], write: _Write) -> int:
    with whole_file(path) as temporary:
        return write(temporary, rows)


def _write_parquet(path: Path, rows: Iterator[pa.Table | pa.RecordBatch]) -> int:
    """Write rows, each part a row group, and return how many; the first part has the columns."""
    first = next(rows)
    num_rows = 0
    with pq.ParquetWriter(path, first.schema, compression="zstd") as writer:
        for part in chain([first], rows):
            table = part if isinstance(part, pa.Table) else pa.Table.from_batches([part])
            writer.write_table(table)
            num_rows += table.num_rows
    return num_rows
