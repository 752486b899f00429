"""TensorBoard's event file: scalars in double precision."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from .series import StepFigures

NAME = "events.out.tfevents.0.tim-trace"
"""TensorBoard reads a file by the word tfevents in its name."""


def write_events(path: Path, figures: Iterable[StepFigures]) -> int:
    """Write the numbers of every step, and return how many. Raises ImportError where TensorBoard is not installed."""
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
