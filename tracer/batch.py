"""Sequences recorded together, the passes that have scored them, and their names."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..schemas.errors import InvalidRecord
from ..schemas.layout import TRAIN_SPLIT
from ..schemas.passes import CURRENT
from .ragged import Padding, shown
from .staging import is_tensor, to_numpy


class Batch:
    """The sequences of one `add_sequences` call, to pass to `add_scores`; rows are numbered in the order given."""

    def __init__(
        self,
        step: int,
        seq_ids: list[str],
        policy_version: Any = None,
        folder: Path | None = None,
        *,
        attempt: int | None = None,
        split: str = TRAIN_SPLIT,
    ):
        """`attempt` is the training attempt that sampled the sequences, None outside training; `split` is in SPLITS."""
        self.step = step
        self.attempt = attempt
        self.split = split
        self.seq_ids = seq_ids
        self.policy_version = policy_version
        self.folder = folder
        """Folder of the trace that the sequences were recorded in; None if unknown."""
        self.width_without_mask: int | None = None
        """Width of the [B, T] batch of responses if the batch was given without a mask; else None."""
        self.refusal: str | None = None
        """The reason why the batch's sequences were rejected; None if they have not been."""
        self._padding: Padding | None = None
        self._lengths: np.ndarray | None = None
        self._prompt_lengths: np.ndarray | None = None
        self._rounds: dict[str, np.ndarray] = {}

    def __len__(self) -> int:
        return len(self.seq_ids)

    @property
    def is_resolved(self) -> bool:
        """True if the response lengths are already on the host."""
        return self._lengths is not None

    def resolve(self, lengths: np.ndarray, padding: Padding | None, prompt_lengths: np.ndarray | None = None) -> None:
        """Set the response lengths [B], the padding of the responses, and the prompt lengths [B]."""
        self._lengths, self._padding, self._prompt_lengths = lengths, padding, prompt_lengths

    def check(self, folder: Path) -> None:
        """Raise InvalidRecord unless the batch's sequences were recorded in this trace."""
        if self.folder is not None and self.folder != folder and not self.folder.samefile(folder):
            raise InvalidRecord(
                f"step {self.step}: the batch was recorded in {self.folder}, but this recorder writes {folder}; add its "
                "scores with the recorder that returned it"
            )
        if self.refusal is not None:
            raise InvalidRecord(
                f"step {self.step}: this batch was rejected ({self.refusal}); correct the call of add_sequences, and add "
                "the scores to the batch that it returns"
            )

    def lengths(self, rows: np.ndarray) -> np.ndarray:
        """Return the response lengths of the given rows. Raises InvalidRecord for a batch that was rejected."""
        if self._lengths is None:
            raise InvalidRecord(f"step {self.step}: this batch was rejected ({self.refusal or 'not recorded'})")
        return np.asarray(self._lengths[rows])

    def whole_lengths(self, rows: np.ndarray) -> np.ndarray | None:
        """Return the prompt plus response lengths of the given rows; None if there are no prompts."""
        return None if self._prompt_lengths is None else self._prompt_lengths[rows] + self.lengths(rows)

    def padding(self, rows: np.ndarray) -> Padding | None:
        """Return the padding of the given rows; None if the batch was not padded."""
        return None if self._padding is None else self._padding.take(rows)

    def rows(self, rows: Any) -> np.ndarray:
        """Check row numbers and return them as int64; None means all rows."""
        if rows is None:
            return np.arange(len(self))
        numbers = to_numpy(rows.cpu() if is_tensor(rows) else rows)
        if numbers.ndim != 1 or (len(numbers) and numbers.dtype.kind not in "iu"):
            hint = "; for a mask, give np.flatnonzero(mask)" if numbers.dtype.kind == "b" else ""
            raise InvalidRecord(f"step {self.step}, rows: got {shown(rows)}; give a list of row numbers{hint}")
        numbers = numbers.astype(np.int64)
        if len(numbers) and not (numbers.min() >= 0 and numbers.max() < len(self)):
            raise InvalidRecord(f"step {self.step}, rows: got {rows!r:.80} for a batch of {len(self)} sequences")
        if len(np.unique(numbers)) != len(numbers):
            raise InvalidRecord(f"step {self.step}, rows: got {rows!r:.80}; give each row's number once")
        return numbers

    def captured_rows(self, captured: Any, scored: np.ndarray) -> np.ndarray:
        """Check the row numbers of captured distributions: each must be a scored row."""
        numbers = self.rows(captured)
        strangers = np.setdiff1d(numbers, scored)
        if len(strangers):
            raise InvalidRecord(
                f"step {self.step}, captured_rows: row {strangers[0]} is not among the scored rows; give its "
                "logprobs in the same call"
            )
        return numbers

    def next_iteration(self, pass_name: str, rows: np.ndarray) -> np.ndarray:
        """Count another scoring of these rows; return how often each had been scored. Only `current` repeats."""
        counts = self._rounds.setdefault(pass_name, np.zeros(len(self), np.int32))
        iteration = np.array(counts[rows])
        if pass_name != CURRENT and iteration.any():
            row = int(rows[np.flatnonzero(iteration)[0]])
            raise InvalidRecord(
                f"step {self.step}, sequence {self.seq_ids[row]!r}: scores of pass {pass_name!r} were already added; a "
                f"pass scores a sequence once, only {CURRENT!r} once per inner iteration"
            )
        counts[rows] += 1
        return iteration

    def take_back(self, pass_name: str, rows: np.ndarray) -> None:
        """Undo the last `next_iteration` for these rows, since their scores were rejected."""
        self._rounds[pass_name][rows] -= 1


@dataclass(slots=True, kw_only=True)
class SequenceNames:
    """Names of the sequences in one split, by step."""

    step: int | None = None
    """The newest step; None before the first sequence."""
    known: dict[int, set[str]] = field(default_factory=dict)
    count: int = 0
    """Number of sequences recorded so far."""

    def refuse_repeated(self, step: int, names: list[str]) -> None:
        """Raise InvalidRecord if a name is repeated or already used in this step."""
        known, seen = self.known.get(step, set[str]()), set[str]()
        if len(set(names)) == len(names) and known.isdisjoint(names):
            return
        for name in names:
            if name in known or name in seen:
                raise InvalidRecord(f"step {step}, sequence {name!r}: occurs twice; (step, seq_id) must be unique")
            seen.add(name)

    def add(self, step: int, names: list[str], *, ordered: bool) -> set[str]:
        """Add names to a step and return all names in it; with `ordered`, names in earlier steps are forgotten."""
        if ordered and step != self.step:
            self.known = {}
        self.refuse_repeated(step, names)
        known = self.known.setdefault(step, set())
        known.update(names)
        self.step = step
        self.count += len(names)
        return known
