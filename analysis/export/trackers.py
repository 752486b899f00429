"""Write step figures for experiment trackers: a TensorBoard event file or an offline W&B run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .series import StepFigures

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
