"""Step figures of a run, and the files of experiment trackers that hold them: TensorBoard events, an offline W&B run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any

from ...schemas.layout import HYPERPARAMETER
from ..trace.database import Database
from ..trace.macros import quoted_pair
from ..trace.source import Pair
from ..trace.sums import ensure
from .sequences import passes_of

_LOGGED = f"""
    SELECT step, name, value, epoch(logged_at) AS logged_s FROM metrics
    WHERE value IS NOT NULL AND NOT starts_with(name, '{HYPERPARAMETER}') ORDER BY step, logged_at, name
"""

_TEXTS = f"""
    SELECT count(*) FROM metrics WHERE value IS NULL AND text IS NOT NULL AND NOT starts_with(name, '{HYPERPARAMETER}')
"""

_KEYS = ("run", "step")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """The numbers to export for one step."""

    step: int
    logged_s: float
    """Time at which the step was logged, seconds since 1970; the trace's creation time if nothing was logged at the step."""
    values: dict[str, float] = field(default_factory=dict)


def step_figures(database: Database, pair: Pair) -> Iterator[StepFigures]:
    """Yield the numbers for every step in order: the pair's columns as `a-b/NAME`, and logged numbers under their own names."""
    begun_s = datetime.fromisoformat(database.sources[0].manifest.created_at).timestamp()
    of_pair = _pair_figures(database, pair)
    for step, rows in groupby(_logged(database), key=lambda row: row[0]):
        for earlier in [known for known in of_pair if known < step]:
            yield StepFigures(step=earlier, logged_s=begun_s, values=of_pair.pop(earlier))
        values, logged_s = of_pair.pop(step, {}), begun_s
        for _, name, value, when in rows:
            values[name] = value
            logged_s = begun_s if when is None else when
        yield StepFigures(step=step, logged_s=logged_s, values=values)
    for step, values in of_pair.items():
        yield StepFigures(step=step, logged_s=begun_s, values=values)


def num_texts(database: Database) -> int:
    """Return the number of logged texts, which are not exported because a series holds only numbers."""
    return int(database.connection.execute(_TEXTS).fetchall()[0][0])


def _logged(database: Database) -> Iterator[tuple[int, str, float, float | None]]:
    for batch in database.connection.batches(_LOGGED):
        yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


def _pair_figures(database: Database, pair: Pair) -> dict[int, dict[str, float]]:
    """Return a mapping from step to the pair's column to value; empty if the trace lacks a pass of the pair."""
    if not set(pair) <= set(passes_of(database)):
        return {}
    ensure(database, pair, of_run=False)
    rows = database.ask(f"SELECT * FROM pair_steps({quoted_pair(pair)}) ORDER BY step").dicts()
    prefix = "-".join(pair)
    return {
        row["step"]: {
            f"{prefix}/{name}": float(value) for name, value in row.items() if name not in _KEYS and value is not None
        }
        for row in rows
    }


EVENTS = "events.out.tfevents.0.tim-trace"
"""Name of the event file. TensorBoard recognizes event files by `tfevents` in the name."""
PROJECT = "tim-trace"
"""Name of the W&B project."""


def write_events(path: Path, figures: Iterable[StepFigures]) -> int:
    """Write a TensorBoard event file in double precision; return the number of values. Raises ImportError without TensorBoard."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.types_pb2 import DT_DOUBLE
    from tensorboard.plugins.scalar.metadata import create_summary_metadata
    from tensorboard.summary.writer.record_writer import RecordWriter

    metadata, num_values, begun = create_summary_metadata(display_name="", description=""), 0, False
    with path.open("wb") as file:
        records = RecordWriter(file)
        for step in figures:
            if not begun:
                records.write(Event(wall_time=step.logged_s, file_version="brain.Event:2").SerializeToString())
                begun = True
            values = [
                Summary.Value(tag=tag, metadata=metadata, tensor=TensorProto(dtype=DT_DOUBLE, double_val=[value]))
                for tag, value in step.values.items()
            ]
            records.write(
                Event(wall_time=step.logged_s, step=step.step, summary=Summary(value=values)).SerializeToString()
            )
            num_values += len(values)
        records.flush()
    return num_values


def write_wandb(folder: Path, name: str, settings: Mapping[str, Any], figures: Iterable[StepFigures]) -> int:
    """Write an offline W&B run, which `wandb sync` uploads; return the number of values. Raises ImportError without wandb."""
    import wandb

    folder.mkdir(parents=True, exist_ok=True)  # otherwise wandb would also write to the temporary folder
    quiet = wandb.Settings(
        silent=True, console="off", disable_git=True, x_disable_stats=True, x_disable_meta=True,
        x_disable_machine_info=True,
    )  # fmt: skip
    run = wandb.init(
        mode="offline",
        dir=str(folder),
        project=PROJECT,
        name=name,
        config=dict(settings),
        settings=quiet,
        reinit="create_new",
    )
    num_values = 0
    try:
        for step in figures:
            run.log(step.values, step=step.step)
            num_values += len(step.values)
    finally:
        run.finish()
    return num_values
