"""Where a trace's weights are: in the trace, or in checkpoints that its run saved."""

from __future__ import annotations

import os
from pathlib import Path

from ..store import Store
from .checkpoints import CheckpointReader
from .reader import WeightReader

FOLDER_VARIABLE = "TIM_TRACE_WEIGHTS_FROM"
"""Environment variable that says for every verb what --weights-from says for those that have it."""


def open_weights(store: Store, weights_from: str | os.PathLike[str] | None = None) -> WeightReader | CheckpointReader:
    """What gives the weights of a trace's policy versions: `.versions`, `.load(version)`.

    Checkpoints lie outside of the trace, and are read from `weights_from` or where TIM_TRACE_WEIGHTS_FROM says: the user's own
    word. The folder that the trace itself names is not read, since a trace can be of a stranger; it is told.
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
