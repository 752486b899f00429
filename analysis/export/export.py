from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import chain, groupby
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from ...schemas.errors import InvalidOption
from ...schemas.layout import HYPERPARAMETER, METRICS, SEQUENCES
from ...schemas.passes import CURRENT, ROLLOUT, STANDARD, TRAIN, standard_first
from ...schemas.results import Result
from ...schemas.steps import ALL_STEPS
from ...schemas.tables import SEQUENCES_TABLE
from ...tracer.progress import Advance, Progress, no_progress
from ...tracer.whole_file import whole_file
from ..report.targets import explained, local, refuse
from ..trace.columns import parse_pair, read_hyperparameters, scored_passes
from ..trace.database import Database
from ..trace.macros import quoted, quoted_pair
from ..trace.source import Pair
from ..trace.sums import ensure
from ..trace.tokens import step_ranges
from ..views import open_database

FORMATS = (PARQUET, TENSORBOARD, WANDB) = ("parquet", "tensorboard", "wandb")


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported(Result):
    _text = "tim_trace.analysis.export.export:exported_text"

    format: str
    output: str
    files: tuple[str, ...]
    """File names in the folder. For wandb, the run folder's name."""
    num_sequences: int
    """Sequences written. 0 for tensorboard and wandb."""
    num_values: int
    """Logged values written. For tensorboard and wandb, this includes the per-step mismatch."""
    num_texts: int
    """Logged text values left out, because tensorboard and wandb series hold only numbers."""


def export_run(
    trace: str | os.PathLike[str], *, to: str, output: str | os.PathLike[str], pair: str = "train:rollout",
    steps: str = ALL_STEPS, force: bool = False, progress: Progress = no_progress,
) -> Exported:  # fmt: skip
    """Write a run's sequences or per-step metrics in another tool's format.

    - `to="parquet"`: `sequences` has one row per sequence, with token ids, mask, rewards, advantages, sampling
      settings, every pass's logprobs and policy version (`PASS_logprobs`, nats, and `PASS_policy_version`; for
      `current`, those of the first iteration) and `d`: logprob(a) -
      logprob(b) in `pair` for every response token, NULL if either logprob is NULL. `metrics` has the logged values.
      `import parquet` reads both files back.
    - `to="tensorboard"` or `"wandb"`: all `pair_steps` columns as `a-b/NAME`, and every logged number under its
      logged name, in double precision. The W&B run is written offline, with the hyperparameters as config.

    `output` is a folder, created if missing. `steps` (3:80, -10:) selects steps. Only a few steps are in memory at a
    time. Existing files are replaced only with `force`. wandb always adds a new run.

    Raises InvalidOption, FileThere, StorageError, NotInstalled (if the tool's library is missing), TraceNotFound,
    NewerTrace or DamagedTrace.
    """
    if to not in FORMATS:
        raise InvalidOption(
            f"got {to!r}; use {', '.join(FORMATS)}; for CSV, tim-trace sql RUN QUERY --csv", option="to"
        )
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
            ((total,),) = database.connection.execute("SELECT count(*) FROM sequences").fetchall()
            with whole_file(folder / files[0]) as path, progress("exporting", total) as advance:
                num_sequences = write_parquet(path, sequence_tables(database, names), advance)
            with whole_file(folder / files[1]) as path:
                rows = database.connection.batches(_METRICS)
                num_values = write_parquet(path, chain([pa.RecordBatch.from_pylist([], rows.schema)], rows))
        else:
            figures = step_figures(database, names)
            if to == WANDB:
                settings = read_hyperparameters(database)
                num_values = write_wandb(folder, database.sources[0].run, settings, figures)
            else:
                num_values = write_events(folder / EVENTS, figures)
            ((texts,),) = database.connection.execute(_TEXTS).fetchall()
    return Exported(
        format=to, output=os.fspath(output), files=files, num_sequences=num_sequences, num_values=num_values,
        num_texts=texts,
    )  # fmt: skip


def exported_text(exported: Exported) -> str:
    if exported.format == PARQUET:
        what = f"{exported.num_sequences:,} sequences and {exported.num_values:,} logged values"
    else:
        left_out = f" (without {exported.num_texts:,} logged text values)" if exported.num_texts else ""
        what = f"{exported.num_values:,} values{left_out}"
    then = {
        TENSORBOARD: f"\nnext: tensorboard --logdir {exported.output}",
        WANDB: f"\nnext: wandb sync {exported.output}/wandb/offline-run-*",
    }.get(exported.format, "")
    return f"wrote {what} to {', '.join(f'{exported.output}/{name}' for name in exported.files)}{then}"


_LOGGED = f"""
    SELECT step, name, value, epoch(logged_at) AS logged_s FROM metrics
    WHERE value IS NOT NULL AND NOT starts_with(name, '{HYPERPARAMETER}') ORDER BY step, logged_at, name
"""

_TEXTS = f"""
    SELECT count(*) FROM metrics WHERE value IS NULL AND text IS NOT NULL AND NOT starts_with(name, '{HYPERPARAMETER}')
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    step: int
    logged_s: float
    """Unix time when the step was logged, or when the trace was created if nothing was logged."""
    values: dict[str, float]


def step_figures(database: Database, pair: Pair) -> Iterator[StepFigures]:
    """Yield each step's values, in step order: pair columns as `a-b/NAME`, and logged numbers under their own names."""
    begun_s = datetime.fromisoformat(database.sources[0].manifest.created_at).timestamp()
    of_pair = _pair_figures(database, pair)
    batches = database.connection.batches(_LOGGED)
    logged = chain.from_iterable(zip(*map(pa.Array.to_pylist, batch.columns), strict=True) for batch in batches)
    for step, rows in groupby(logged, key=lambda row: row[0]):
        for earlier in [known for known in of_pair if known < step]:
            yield StepFigures(step=earlier, logged_s=begun_s, values=of_pair.pop(earlier))
        values, logged_s = of_pair.pop(step, {}), begun_s
        for _, name, value, when in rows:
            values[name] = value
            logged_s = begun_s if when is None else when
        yield StepFigures(step=step, logged_s=logged_s, values=values)
    for step, values in of_pair.items():
        yield StepFigures(step=step, logged_s=begun_s, values=values)


def _pair_figures(database: Database, pair: Pair) -> dict[int, dict[str, float]]:
    if not {*pair} <= {*scored_passes(database)}:
        return {}
    ensure(database, pair, of_run=False)
    rows = database.ask(f"SELECT * FROM pair_steps({quoted_pair(pair)}) ORDER BY step").dicts()
    names = {name: f"{'-'.join(pair)}/{name}" for name in (rows[0] if rows else ()) if name not in ("run", "step")}
    return {
        row["step"]: {shown: float(row[name]) for name, shown in names.items() if row[name] is not None} for row in rows
    }


EVENTS = "events.out.tfevents.0.tim-trace"
"""TensorBoard recognizes event files by `tfevents` in the name."""


def write_events(path: Path, figures: Iterable[StepFigures]) -> int:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.types_pb2 import DT_DOUBLE
    from tensorboard.plugins.scalar.metadata import create_summary_metadata
    from tensorboard.summary.writer.record_writer import RecordWriter

    metadata, num_values = create_summary_metadata(display_name="", description=""), 0
    with whole_file(path) as temporary, temporary.open("wb") as file:
        records = RecordWriter(file)
        for number, step in enumerate(figures):
            if not number:
                records.write(Event(wall_time=step.logged_s, file_version="brain.Event:2").SerializeToString())
            values = [
                Summary.Value(tag=tag, metadata=metadata, tensor=TensorProto(dtype=DT_DOUBLE, double_val=[value]))
                for tag, value in step.values.items()
            ]
            event = Event(wall_time=step.logged_s, step=step.step, summary=Summary(value=values))
            records.write(event.SerializeToString())
            num_values += len(values)
        records.flush()
    return num_values


def write_wandb(folder: Path, name: str, settings: Mapping[str, float | str], figures: Iterable[StepFigures]) -> int:
    """Write an offline run for `wandb sync` and return the number of values. Raises ImportError if wandb is missing."""
    import wandb

    folder.mkdir(parents=True, exist_ok=True)  # if the folder is missing, wandb writes to a temporary folder
    quiet = wandb.Settings(
        silent=True, console="off", disable_git=True, x_disable_stats=True, x_disable_meta=True,
        x_disable_machine_info=True,
    )  # fmt: skip
    run = wandb.init(
        mode="offline", dir=str(folder), project="tim-trace", name=name, config=dict(settings), settings=quiet,
        reinit="create_new",
    )  # fmt: skip
    num_values = 0
    try:
        for step in figures:
            run.log(step.values, step=step.step)
            num_values += len(step.values)
    finally:
        run.finish()
    return num_values


CHUNK_TOKENS = 1 << 20
"""Maximum prompt and response tokens held in memory at once, unless a single step has more."""

_COLUMNS = tuple(column.name for column in SEQUENCES_TABLE.columns if column.name not in ("attempt", "writer"))

_STEPS = """
    SELECT step, sum(num_response_tokens + coalesce(num_prompt_tokens, 0))::BIGINT FROM sequences GROUP BY step ORDER BY step
"""

_METRICS = "SELECT step, name, value, text FROM metrics ORDER BY step, logged_at, name"


def sequence_tables(database: Database, pair: Pair) -> Iterator[pa.Table]:
    passes = {name: f"p{place}" for place, name in enumerate(sorted(scored_passes(database), key=standard_first))}
    tokens = dict(database.connection.execute(_STEPS).fetchall())
    for steps in step_ranges(tokens, CHUNK_TOKENS) or [range(0)]:
        yield database.connection.sql(_row_query(passes, pair, steps)).to_arrow_table()


def _row_query(passes: Mapping[str, str], pair: Pair, steps: range) -> str:
    within = f"step BETWEEN {steps.start} AND {steps.stop - 1}"
    columns = [f"s.{name}" for name in _COLUMNS]
    columns += [f'{table}.logprobs AS "{name}_logprobs"' for name, table in passes.items()]
    entropies = [f"{passes[name]}.entropy" for name in (TRAIN, CURRENT, ROLLOUT) if name in passes]
    columns += [f'{passes[name]}.policy_version AS "{name}_policy_version"' for name in STANDARD if name in passes]
    columns.append(f"coalesce({', '.join([*entropies, 'NULL::FLOAT[]'])}) AS entropy")
    d = "NULL::DOUBLE[]"
    if set(pair) <= set(passes):
        a, b = (f"{passes[name]}.logprobs" for name in pair)
        d = (
            f"CASE WHEN {a} IS NOT NULL AND {b} IS NOT NULL "
            f"THEN list_transform(list_zip({a}, {b}), lambda x: x[1]::DOUBLE - x[2]::DOUBLE) END"
        )
    joins = "".join(
        f" LEFT JOIN (SELECT step, seq_id, logprobs, entropy, policy_version FROM scores WHERE {within} AND iteration = 0 "
        f'AND "pass" = {quoted(name)}) AS {table} ON {table}.step = s.step AND {table}.seq_id = s.seq_id'
        for name, table in passes.items()
    )
    rows = f"(SELECT * FROM sequences WHERE {within}) AS s{joins}"
    return f"SELECT {', '.join(columns)}, {d} AS d FROM {rows} ORDER BY s.step, s.seq_id"


def write_parquet(path: Path, rows: Iterator[pa.Table | pa.RecordBatch], advance: Advance = lambda number: None) -> int:
    first = next(rows)
    num_rows = 0
    with pq.ParquetWriter(path, first.schema, compression="zstd") as writer:
        for part in chain([first], rows):
            writer.write(part)
            num_rows += part.num_rows
            advance(part.num_rows)
    return num_rows
