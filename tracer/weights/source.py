"""Where a trace's weights are: in the trace, or in checkpoints that its run saved."""

from __future__ import annotations

from pathlib import Path

from ..store import Store
from .checkpoints import CheckpointReader
from .reader import WeightReader


def open_weights(store: Store) -> WeightReader | CheckpointReader:
    """What gives the weights of a trace's policy versions: `.versions`, `.load(version)`."""
    manifest = store.manifest()
    reader = WeightReader(store, store.writers()[0], needs_checksums=manifest.is_checked)
    if reader.versions or reader.damaged or manifest.weights_from is None:
        return reader
    return CheckpointReader(Path(manifest.weights_from))
