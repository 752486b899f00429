"""How much of the weights an update changed, as the kept versions count it."""

from __future__ import annotations

import numpy as np

from ...tracer.weights.reader import WeightReader
from ...tracer.weights.source import open_weights
from ..trace.database import Database
from .columns import Column


def read_changed(database: Database, run: str) -> list[Column]:
    """Read the share of elements whose bits changed, at the step whose update made the version; reads no tensor."""
    source = next(source for source in database.sources if source.run == run)
    reader = open_weights(source.store)
    if not isinstance(reader, WeightReader):
        return []
    shares: dict[int, float] = {}
    for version in reader.versions:
        parts = reader.parts[version]
        counts = [part.num_changed for part in parts]
        if version > 0 and all(count is not None for count in counts):
            elements = sum(tensor.numel for part in parts for tensor in reader.layout(part).tensors)
            changed = sum(sum(count.values()) for count in counts if count is not None)
            shares[version] = changed / elements if elements else np.nan
    kept = database.kept_steps.get(run)
    steps = np.array(sorted(shares if kept is None else shares.keys() & set(kept)), np.int64)
    values = np.array([shares[int(step)] for step in steps])
    what = "share of the weights whose bits differ from the version kept before"
    return [Column("changed_weights", steps, values, what)]
