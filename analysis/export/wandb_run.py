"""A run of Weights & Biases, written offline: `wandb sync` sends it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .series import StepFigures

PROJECT = "tim-trace"


def write_wandb(folder: Path, name: str, settings: Mapping[str, Any], figures: Iterable[StepFigures]) -> int:
    """Write the numbers of every step, and return how many. Raises ImportError where wandb is not installed."""
    import wandb

    folder.mkdir(parents=True, exist_ok=True)  # else wandb takes the temporary folder
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
