"""Rows of one table that wait in memory until they are sealed."""

from __future__ import annotations

import pyarrow as pa


class HeldRows:
    """Takes record batches as a journal's stream does, and keeps them: for a trace of which a killed process leaves nothing."""

    is_synced = False

    def __init__(self) -> None:
        self.batches: list[pa.RecordBatch] = []
        self.num_bytes = 0

    def append(self, batch: pa.RecordBatch) -> None:
        """Keep rows; they are validated, as those that a journal is read for are."""
        batch.validate(full=True)
        self.batches.append(batch)
        self.num_bytes += batch.nbytes

    def sync(self) -> None:
        """Nothing of them is on the disk."""

    def close(self) -> None:
        """They stay until they are sealed."""
