"""Rows in each forward pass of a verl engine, read from the engine's micro-batches.

Shapes: B rows in a worker's batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

import numpy as np

from ...schemas.passes import REFERENCE, TRAIN
from ..rows import Forward
from .verl_contract import FSDP

ROW_KEY = "tim_trace_row"
"""Key that recording adds to a worker's batch. It holds the row indices in a shuffled micro-batch."""
FORWARD_KEYS = {name: f"tim_trace_forward_{name}" for name in (TRAIN, REFERENCE)}
"""Pass recorded by the driver -> column in the workers' output that holds the result of `Forwards.column`."""


class Forwards:
    """Forward passes of an engine call: each row's pass, position in it, number of rows, and padding after it."""

    def __init__(self, engine: Any, numbers: Iterator[int]):
        """`numbers` yields the numbers to give to this process's forward passes."""
        self._engine = engine
        self._numbers = numbers
        self._of_row: dict[int, tuple[int, int, int, int]] = {}

    @staticmethod
    def are_known(engine: Any) -> bool:
        """Return True if an engine pads rows as verl's FSDP engine does."""
        return getattr(getattr(engine, "engine_config", None), "strategy", None) in FSDP

    def add(self, micro_batches: Sequence[Any], *, is_packed: bool) -> None:
        """Store the rows in each micro-batch. Each micro-batch is one forward pass."""
        # The driver records rows from several processes, each of which numbers its forward passes from 0.
        rank, size = self._engine.get_data_parallel_rank(), self._engine.get_data_parallel_size()
        for part in micro_batches:
            rows = part[ROW_KEY].tolist()
            lengths = part["input_ids"].offsets().diff().tolist()
            padding = [max(lengths) - length for length in lengths]
            if is_packed:
                padding = [0] * (len(rows) - 1) + [self._tail(sum(lengths))]
            number = next(self._numbers) * size + rank
            for place, (row, after) in enumerate(zip(rows, padding, strict=True)):
                self._of_row[int(row)] = (number, place, len(rows), after)

    def _tail(self, num_tokens: int) -> int:
        """Return the padding after packed rows: to the next bucket size, then to a multiple of the Ulysses ranks."""
        engine, width = self._engine, num_tokens
        settings = engine.engine_config
        bucket = getattr(settings, "pad_to_length_bucket", 1) if getattr(engine, "pad_to_length", False) else 1
        for multiple in (bucket, getattr(settings, "ulysses_sequence_parallel_size", 1)):
            width = -(-width // multiple) * multiple
        return width - num_tokens

    def column(self, num_rows: int) -> Any:
        """Return [B, 4] int64: each row's forward pass, position, number of rows and padding; None if any had none."""
        import torch

        found = [self._of_row[row] for row in range(num_rows) if row in self._of_row]
        return torch.tensor(found, dtype=torch.int64) if len(found) == num_rows else None

    def of(self, rows: Sequence[int]) -> Forward | None:
        """Return the forward passes of the given rows; None if any row was in no forward pass."""
        known = all(int(row) in self._of_row for row in rows)
        return forward_of([np.array(self._of_row[int(row)]) for row in rows]) if known else None


def attended_tokens(loss_mask: Any) -> dict[str, int]:
    """Return the number of tokens per padded row that attention sees: before verl 0.8, the loss mask's width."""
    since_0_8 = "build_attention_mask_from_nested"
    is_all = loss_mask.is_nested or hasattr(import_module("verl.workers.utils.padding"), since_0_8)
    return {} if is_all else {"attended_tokens": loss_mask.shape[1]}


def forward_of(values: Sequence[np.ndarray] | None) -> Forward | None:
    """Return the forward passes described by a worker's column, which holds an array [4] per row."""
    if values is None or not len(values):
        return None
    ids, places, rows, after = np.stack(values).astype(np.int64).T
    return Forward(ids=ids, places=places, rows=rows, pad_left=np.zeros_like(after), pad_right=after)
