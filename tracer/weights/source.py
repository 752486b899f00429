"""Where a trace's weights are: in the trace, or in checkpoints that its run saved."""

from __future__ import annotations

from pathlib import Path

from ..store import Store
from .checkpoints import CheckpointReader
from .reader import WeightReader


def open_weights(store: Store) -> WeightReader | CheckpointReader:
    """What gives the weights of a trace's policy versions: `.versions`, `.load(version)`."""
    reader = WeightReader(store)
    folder = store.manifest().weights_from
    return reader if reader.parts or folder is None else CheckpointReader(Path(folder))
