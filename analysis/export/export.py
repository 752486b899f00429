"""Export the sequences or step figures of a trace to the file formats of other tools."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from ...schemas.errors import InvalidOption, NotInstalled
from ...schemas.layout import METRICS, SEQUENCES
from ...schemas.results import Result
from ...schemas.steps import ALL_STEPS
from ...tracer.progress import Progress, no_progress
from ...tracer.whole_file import whole_file
from ..report.targets import explained, local, refuse
from ..trace.database import Database
from ..trace.hyperparameters import read_hyperparameters
from ..trace.pairs import parse_pair
from ..trace.source import Pair
from ..views import open_database
from .sequences import metric_batches, sequence_tables, write_parquet
from .trackers import EVENTS, num_texts, step_figures, write_events, write_wandb

FORMATS = (PARQUET, TENSORBOARD, WANDB) = ("parquet", "tensorboard", "wandb")


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported(Result):
    """The files written by an export, with counts."""

    _text = "tim_trace.analysis.export.export:exported_text"

    format: str
    output: str
    """Path of the folder written to."""
    files: tuple[str, ...]
    """Names of the files written in the folder; for wandb, the name of the run's folder."""
    num_sequences: int
    """Number of sequences written; 0 if the format holds step figures."""
    num_values: int
    """Number of step figures written; for formats that hold sequences, the number of logged values."""
    num_texts: int
    """Number of logged texts, which are not exported because a series holds only numbers."""


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

    `to` parquet: `sequences`, one row per sequence with token ids, mask, rewards, advantages, sampling settings, the
    logprobs of every pass (`PASS_logprobs`, nats; first iteration of `current`) and `d`, which is logprob(a) -
    logprob(b) of `pair` for every response token, NULL if either logprob is NULL; and `metrics`, the logged values.
    `import parquet` reads both. `to` tensorboard or wandb: the columns of `pair_steps` as `a-b/NAME` and every logged
    number under its own name, in double precision. The W&B run is written offline and keeps the hyperparameters as
    config.

    `output` is a folder, created if missing. `steps` (3:80, -10:) selects steps; only a few are in memory at a time. Existing
    files are replaced only with `force`; wandb always adds a new run.

    Raises InvalidOption, FileThere, StorageError, NotInstalled if the tool's library is missing, TraceNotFound, NewerTrace or
    DamagedTrace.
    """
    if to not in FORMATS:
        raise InvalidOption(f"got {to!r}; use {', '.join(FORMATS)}", option="to")
    names, folder = parse_pair(pair), local(output)
    files = {
        PARQUET: (f"{SEQUENCES}.parquet", f"{METRICS}.parquet"),
        TENSORBOARD: (EVENTS,), WANDB: ("wandb",),
    }[to]  # fmt: skip
    if to != WANDB:
        refuse([folder / name for name in files], force)
    database = open_database(trace, steps)
    num_sequences = num_values = texts = 0
    with explained(output), database.telling(progress):
        if to == PARQUET:
            with whole_file(folder / files[0]) as path:
                num_sequences = write_parquet(path, _counted(sequence_tables(database, names), database, progress))
            with whole_file(folder / files[1]) as path:
                num_values = write_parquet(path, metric_batches(database))
        else:
            num_values, texts = _write_figures(to, folder, database, names), num_texts(database)
    return Exported(
        format=to, output=os.fspath(output), files=files, num_sequences=num_sequences, num_values=num_values,
        num_texts=texts,
    )  # fmt: skip


def _write_figures(to: str, folder: Path, database: Database, pair: Pair) -> int:
    figures = step_figures(database, pair)
    with _installed(to):
        if to == WANDB:
            return write_wandb(folder, database.sources[0].run, read_hyperparameters(database), figures)
        with whole_file(folder / EVENTS) as path:
            return write_events(path, figures)


@contextmanager
def _installed(library: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise NotInstalled(f"export: needs {library}, which is not installed; pip install {library}") from error


def _counted(tables: Iterator[pa.Table], database: Database, progress: Progress) -> Iterator[pa.Table]:
    """Yield the tables unchanged, and advance a progress bar by their sequences."""
    ((total,),) = database.connection.execute("SELECT count(*) FROM sequences").fetchall()
    with progress("exporting", total) as advance:
        for table in tables:
            yield table
            advance(table.num_rows)


def exported_text(exported: Exported) -> str:
    """Render a summary of what was written, and a command that reads the files."""
    if exported.format == PARQUET:
        what = f"{exported.num_sequences:,} sequences and {exported.num_values:,} logged values"
    else:
        left_out = f"; {exported.num_texts:,} logged texts left out" if exported.num_texts else ""
        what = f"{exported.num_values:,} numbers{left_out}"
    then = {
        TENSORBOARD: f"\nnext: tensorboard --logdir {exported.output}",
        WANDB: f"\nnext: wandb sync {exported.output}/wandb/offline-run-*",
    }.get(exported.format, "")
    return f"wrote {what} to {', '.join(f'{exported.output}/{name}' for name in exported.files)}{then}"
