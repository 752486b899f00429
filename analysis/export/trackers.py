"""Write step figures for experiment trackers: a TensorBoard event file, an offline W&B run, or MLflow's SQLite store."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .series import StepFigures

EVENTS = "events.out.tfevents.0.tim-trace"
"""Name of the event file. TensorBoard recognizes event files by `tfevents` in the name."""
MLFLOW_STORE = "mlflow.db"
PROJECT = "tim-trace"
"""Name of the W&B project and of the MLflow experiment."""
_FORBIDDEN = re.compile(r"[^\w.\- :/]")
"""Characters that MLflow does not allow in names."""
_MOST_VALUES, _MOST_PARAMETERS = 1000, 100
"""Maximum number of values, and of parameters, that MLflow accepts per request."""
_LONGEST = 6000
"""Maximum length of an MLflow parameter, characters."""
_NO_TELEMETRY = "MLFLOW_DISABLE_TELEMETRY"


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


def write_mlflow(folder: Path, name: str, settings: Mapping[str, Any], figures: Iterable[StepFigures]) -> int:
    """Add a run to an MLflow store in SQLite; return the number of values. Raises ImportError without mlflow."""
    with _without_telemetry():
        import sqlalchemy  # noqa: F401  # missing with mlflow-skinny
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        folder.mkdir(parents=True, exist_ok=True)
        client = MlflowClient(tracking_uri=f"sqlite:///{(folder / MLFLOW_STORE).absolute()}")
        experiment = client.get_experiment_by_name(PROJECT)
        chosen = (
            client.create_experiment(PROJECT, artifact_location=(folder / "artifacts").absolute().as_uri())
            if experiment is None
            else experiment.experiment_id
        )
        names = _Names()
        parameters = [Param(names.of(key), str(value)[:_LONGEST]) for key, value in settings.items()]
        run = None
        num_values, last_ms = 0, None
        for step in figures:
            last_ms = round(step.logged_s * 1000)
            if run is None:
                run = client.create_run(chosen, start_time=last_ms, run_name=name).info.run_id
            metrics = [Metric(names.of(key), value, last_ms, step.step) for key, value in step.values.items()]
            for part in _parts(metrics, _MOST_VALUES):
                client.log_batch(run, metrics=part)
            num_values += len(metrics)
        if run is None:
            run = client.create_run(chosen, run_name=name).info.run_id
        for part in _parts(parameters, _MOST_PARAMETERS):
            client.log_batch(run, params=part)
        client.set_terminated(run, end_time=last_ms)
    return num_values


def _parts(values: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (values[start : start + size] for start in range(0, len(values), size))


class _Names:
    """Mapping from arbitrary names to names that MLflow allows; a numeric suffix keeps names distinct."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}

    def of(self, name: str) -> str:
        if name not in self._known:
            base = "/".join(part for part in _FORBIDDEN.sub("_", name)[:240].split("/") if part.strip(". ")) or "_"
            found, number = base, 2
            while found in self._known.values():
                found, number = f"{base}_{number}", number + 1
            self._known[name] = found
        return self._known[name]


@contextmanager
def _without_telemetry() -> Iterator[None]:
    """Disable mlflow's telemetry."""
    before = os.environ.get(_NO_TELEMETRY)
    os.environ[_NO_TELEMETRY] = "true"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NO_TELEMETRY]
        else:
            os.environ[_NO_TELEMETRY] = before
