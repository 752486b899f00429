"""What was exported, as text."""

from __future__ import annotations

from .export import JSONL, MLFLOW, PARQUET, TENSORBOARD, WANDB, Exported
from .mlflow_run import NAME as MLFLOW_NAME


def exported_text(exported: Exported) -> str:
    """Say what was written, and what reads it."""
    if exported.format in (PARQUET, JSONL):
        what = f"{exported.num_sequences:,} sequences and {exported.num_values:,} logged values"
    else:
        left_out = f"; {exported.num_texts:,} logged texts are left out" if exported.num_texts else ""
        what = f"{exported.num_values:,} numbers{left_out}"
    then = {
        TENSORBOARD: f"\nnext: tensorboard --logdir {exported.output}",
        MLFLOW: f"\nnext: mlflow ui --backend-store-uri sqlite:///{exported.output}/{MLFLOW_NAME}",
        WANDB: f"\nnext: wandb sync {exported.output}/wandb/offline-run-*",
    }.get(exported.format, "")
    return f"wrote {what} to {', '.join(f'{exported.output}/{name}' for name in exported.files)}{then}"
