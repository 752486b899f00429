"""Sequences that were recorded together, which passes have scored them, and their names."""

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
    """What `add_sequences` returns and `add_scores` takes; its rows are numbered as they were given."""

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
        """`attempt` is the attempt at training that made the sequences; None outside of training. `split` is one of SPLITS."""
        self.step = step
        self.attempt = attempt
        self.split = split
        self.seq_ids = seq_ids
        self.policy_version = policy_version
        self.folder = folder
        """The trace that its sequences are in; None where that is not known."""
        self.width_without_mask: int | None = None
        """Width of the [B, T] batch of responses if it came without a mask; else None."""
        self.refusal: str | None = None
        """Why its sequences were not recorded, once that is known."""
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

    def check(self, folder: Path) -> None:
        """Raise InvalidRecord unless its sequences were recorded, in this trace."""
        if self.folder is not None and self.folder != folder and not self.folder.samefile(folder):
            raise InvalidRecord(
                f"step {self.step}: the batch was recorded in {self.folder}, and this recorder writes {folder}; add its "
                "scores with the recorder that gave it"
            )
        if self.refusal is not None:
            raise InvalidRecord(
                f"step {self.step}: this batch was refused ({self.refusal}); give add_sequences what is right, and its "
                "scores to the batch that it returns"
            )

    def lengths(self, rows: np.ndarray) -> np.ndarray:
        """Response tokens of some rows. Raises InvalidRecord for a batch that was refused."""
        if self._lengths is None:
            raise InvalidRecord(f"step {self.step}: this batch was refused ({self.refusal or 'it is not recorded'})")
        return np.asarray(self._lengths[rows])

    def whole_lengths(self, rows: np.ndarray) -> np.ndarray | None:
        """Prompt and response tokens of some rows; None where no prompts were given."""
        return None if self._prompt_lengths is None else self._prompt_lengths[rows] + self.lengths(rows)

    def padding(self, rows: np.ndarray) -> Padding | None:
        """Padding of some rows; None for a batch that was given ragged."""
        return None if self._padding is None else self._padding.take(rows)

    def rows(self, rows: Any) -> np.ndarray:
        """Check row numbers; None stands for all rows."""
        if rows is None:
            return np.arange(len(self))
        numbers = to_numpy(rows.cpu() if is_tensor(rows) else rows)
        if numbers.ndim != 1 or (len(numbers) and numbers.dtype.kind not in "iu"):
            hint = "; of a mask, give np.flatnonzero(mask)" if numbers.dtype.kind == "b" else ""
            raise InvalidRecord(f"step {self.step}, rows: got {shown(rows)}; give a list of row numbers{hint}")
        numbers = numbers.astype(np.int64)
        if len(numbers) and not (numbers.min() >= 0 and numbers.max() < len(self)):
            raise InvalidRecord(f"step {self.step}, rows: got {rows!r:.80} for a batch of {len(self)} sequences")
        if len(np.unique(numbers)) != len(numbers):
            raise InvalidRecord(f"step {self.step}, rows: got {rows!r:.80}; give each row's number once")
        return numbers

    def captured_rows(self, captured: Any, scored: np.ndarray) -> np.ndarray:
        """Check the numbers of rows with distributions: each must be a scored row."""
        numbers = self.rows(captured)
        strangers = np.setdiff1d(numbers, scored)
        if len(strangers):
            raise InvalidRecord(
                f"step {self.step}, captured_rows: row {strangers[0]} is not among the rows that are scored; give its "
                "logprobs in the same call"
            )
        return numbers

    def next_iteration(self, pass_name: str, rows: np.ndarray) -> np.ndarray:
        """Count one more scoring of these rows, and return the number of earlier ones: the iteration of each.

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


@dataclass(slots=True, kw_only=True)
class SequenceNames:
    """Names of the sequences of one split, by step."""

    step: int | None = None
    """The newest step; None before the first."""
    known: dict[int, set[str]] = field(default_factory=dict)
    count: int = 0
    """Sequences so far."""

    def refuse_repeated(self, step: int, names: list[str]) -> None:
        """Raise InvalidRecord for a name that comes twice, before any of them counts as known."""
        known, seen = self.known.get(step, set[str]()), set[str]()
        if len(set(names)) == len(names) and known.isdisjoint(names):
            return
        for name in names:
            if name in known or name in seen:
                raise InvalidRecord(
                    f"step {step}, sequence {name!r}: comes a second time; (step, seq_id) names one sequence"
                )
            seen.add(name)

    def add(self, step: int, names: list[str], *, ordered: bool) -> set[str]:
        """Note names of a step, and return all that are known of it; `ordered` steps do not come again later."""
        if ordered and step != self.step:
            self.known = {}
        self.refuse_repeated(step, names)
        known = self.known.setdefault(step, set())
        known.update(names)
        self.step = step
        self.count += len(names)
        return known
