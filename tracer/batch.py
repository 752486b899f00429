"""Sequences that were recorded together, and which passes have scored them."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..schemas.errors import InvalidRecord
from ..schemas.passes import CURRENT
from .ragged import Padding


class Batch:
    """What `add_sequences` returns and `add_scores` takes; its rows are numbered as they were given."""

    def __init__(self, step: int, seq_ids: list[str], policy_version: Any = None, *, attempt: int | None = None):
        """`attempt` is the attempt at training that made the sequences; None outside of training."""
        self.step = step
        self.attempt = attempt
        self.seq_ids = seq_ids
        self.policy_version = policy_version
        self._padding: Padding | None = None
        self._lengths: np.ndarray | None = None
        self._prompt_lengths: np.ndarray | None = None
        self._rounds: dict[str, np.ndarray] = {}

    def __len__(self) -> int:
        return len(self.seq_ids)

    @property
    def is_resolved(self) -> bool:
        """Whether the responses' lengths are on the host already."""
        return self._lengths is not None

    def resolve(self, lengths: np.ndarray, padding: Padding | None, prompt_lengths: np.ndarray | None = None) -> None:
        """Set the responses' lengths [B], the padding of the batch that they came in, and the prompts' lengths [B]."""
        self._lengths, self._padding, self._prompt_lengths = lengths, padding, prompt_lengths

    def lengths(self, rows: np.ndarray) -> np.ndarray:
        """Response tokens of some rows."""
        assert self._lengths is not None
        return np.asarray(self._lengths[rows])

    def whole_lengths(self, rows: np.ndarray) -> np.ndarray | None:
        """Prompt and response tokens of some rows; None where no prompts were given."""
        return None if self._prompt_lengths is None else self._prompt_lengths[rows] + self.lengths(rows)

    def padding(self, rows: np.ndarray) -> Padding | None:
        """Padding of some rows; None for a batch that was given ragged."""
        return None if self._padding is None else self._padding.take(rows)

    def rows(self, rows: Any) -> np.ndarray:
        """Check row numbers, all of them for None."""
        if rows is None:
            return np.arange(len(self))
        numbers = np.asarray(rows, dtype=np.int64)
        if len(numbers) and not (numbers.min() >= 0 and numbers.max() < len(self)):
            raise InvalidRecord(f"step {self.step}, rows: got {rows!r:.80} for a batch of {len(self)} sequences")
        seen = np.zeros(len(self), bool)
        seen[numbers] = True
        if numbers.ndim != 1 or seen.sum() != len(numbers):
            raise InvalidRecord(f"step {self.step}, rows: got {rows!r:.80}; give each row's number once")
        return numbers

    def next_iteration(self, pass_name: str, rows: np.ndarray) -> np.ndarray:
        """Count one more scoring of these rows, and return how many there were: the iteration of each.

        Only `current` may score a sequence twice: the loss sees it once an inner iteration.
        """
        counts = self._rounds.setdefault(pass_name, np.zeros(len(self), np.int32))
        iteration = np.array(counts[rows])
        if pass_name != CURRENT and iteration.any():
            row = int(rows[np.flatnonzero(iteration)[0]])
            raise InvalidRecord(
                f"step {self.step}, sequence {self.seq_ids[row]!r}: scores of pass {pass_name!r} were added before; a "
                f"pass scores a sequence once, and only {CURRENT!r} once an inner iteration"
            )
        counts[rows] += 1
        return iteration

    def take_back(self, pass_name: str, rows: np.ndarray) -> None:
        """Undo the last count of these rows: their scores were refused."""
        self._rounds[pass_name][rows] -= 1
