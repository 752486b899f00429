"""Finds the weights for a trace, either stored in it or in checkpoints that its run saved."""

from __future__ import annotations

import os
from pathlib import Path

from ..store import Store
from .checkpoints import CheckpointReader
from .reader import WeightReader

FOLDER_VARIABLE = "TIM_TRACE_WEIGHTS_FROM"
"""Name of the environment variable that sets --weights-from for every command."""


def open_weights(store: Store, weights_from: str | os.PathLike[str] | None = None) -> WeightReader | CheckpointReader:
    """Return a reader of a trace's policy versions: `.versions`, `.load(version)`.

    Checkpoints outside the trace are read only from a folder given by the user: `weights_from` or TIM_TRACE_WEIGHTS_FROM. The
    folder recorded in the trace itself is reported but not read, since the trace may come from an untrusted source.
    """
    manifest = store.manifest()
    writers, damaged = store.writers()
    reader = WeightReader(store, writers, needs_checksums=manifest.is_checked, checkpoints=manifest.weights_from)
    reader.damaged[:0] = damaged
    if weights_from is not None:
        return CheckpointReader(Path(weights_from))
    if reader.versions or reader.damaged or manifest.weights_from is None:
        return reader
    folder = os.environ.get(FOLDER_VARIABLE)
    return CheckpointReader(Path(folder)) if folder else reader
