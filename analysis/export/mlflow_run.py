"""A run of MLflow in a SQLite file: `mlflow ui` shows it, and other stores take it from there."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .series import StepFigures

NAME = "mlflow.db"
EXPERIMENT = "tim-trace"
_FORBIDDEN = re.compile(r"[^\w.\- :/]")
"""What no name of a metric or parameter may hold."""
_MOST_VALUES, _MOST_PARAMETERS = 1000, 100
"""Numbers and parameters that a store takes at once."""
_LONGEST = 6000
"""Characters of a parameter."""
_NO_TELEMETRY = "MLFLOW_DISABLE_TELEMETRY"


def write_mlflow(folder: Path, name: str, settings: Mapping[str, Any], figures: Iterable[StepFigures]) -> int:
    """Write the numbers of every step as a new run, and return how many. Raises ImportError where mlflow is not installed."""
    with _without_telemetry():
        import sqlalchemy  # noqa: F401  # which mlflow-skinny does not bring
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        folder.mkdir(parents=True, exist_ok=True)
        client = MlflowClient(tracking_uri=f"sqlite:///{(folder / NAME).absolute()}")
        experiment = client.get_experiment_by_name(EXPERIMENT)
        chosen = (
            client.create_experiment(EXPERIMENT, artifact_location=(folder / "artifacts").absolute().as_uri())
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
    """Names as MLflow takes them; two that would become one get a number."""

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
    """Let mlflow tell nobody that it is used: a trace is exported on this machine alone."""
    before = os.environ.get(_NO_TELEMETRY)
    os.environ[_NO_TELEMETRY] = "true"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NO_TELEMETRY]
        else:
            os.environ[_NO_TELEMETRY] = before
