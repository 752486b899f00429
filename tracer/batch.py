from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..schemas.errors import InvalidRecord
from ..schemas.layout import TRAIN_SPLIT
from ..schemas.passes import CURRENT
from .ragged import Padding, is_padded, shown
from .staging import is_tensor, to_numpy


class Batch:
    """The sequences of one `add_sequences` call. Pass this object to `add_scores`."""

    def __init__(
        self, step: int, seq_ids: list[str], policy_version: Any = None, folder: Path | None = None, *,
        attempt: int | None = None, split: str = TRAIN_SPLIT, is_named: bool = True,
    ):  # fmt: skip
        self.step = step
        self.attempt = attempt
        self.split = split
        self.seq_ids = seq_ids
        self.is_named = is_named
        """False if `seq_ids` was generated. Messages then refer to sequences by row number."""
        self.policy_version = policy_version
        self.folder = folder
        self.width_without_mask: int | None = None
        """Width T if the responses were a [B, T] batch without a mask, otherwise None."""
        self.refusal: str | None = None
        self._padding: Padding | None = None
        self._lengths: np.ndarray | None = None
        self._prompt_lengths: np.ndarray | None = None
        self._rounds: dict[str, np.ndarray] = {}

    def __len__(self) -> int:
        return len(self.seq_ids)

    def label(self, row: int) -> str:
        return f"sequence {self.seq_ids[row]!r}" if self.is_named else f"row {row}"

    @property
    def is_resolved(self) -> bool:
        return self._lengths is not None

    def resolve(self, lengths: np.ndarray, padding: Padding | None, prompt_lengths: np.ndarray | None = None) -> None:
        self._lengths, self._padding, self._prompt_lengths = lengths, padding, prompt_lengths

    def check(self, folder: Path) -> None:
        if self.folder is not None and self.folder != folder and not self.folder.samefile(folder):
            raise InvalidRecord(
                f"step {self.step}: the batch was recorded in {self.folder}, but this recorder writes to {folder}. "
                "Add its scores with the recorder that returned the batch"
            )
        if self.refusal is not None:
            raise InvalidRecord(
                f"step {self.step}: this batch was rejected ({self.refusal}). Fix the add_sequences call, and add the "
                "scores to the batch that it returns"
            )

    def lengths(self, rows: np.ndarray) -> np.ndarray:
        if self._lengths is None:
            raise InvalidRecord(f"step {self.step}: this batch was not recorded ({self.refusal or 'reason unknown'})")
        return np.asarray(self._lengths[rows])

    def whole_lengths(self, rows: np.ndarray) -> np.ndarray | None:
        return None if self._prompt_lengths is None else self._prompt_lengths[rows] + self.lengths(rows)

    def padding(self, rows: np.ndarray) -> Padding | None:
        return None if self._padding is None else self._padding.take(rows)

    def rows(self, rows: Any) -> np.ndarray:
        if rows is None:
            return np.arange(len(self))
        numbers = to_numpy(rows.cpu() if is_tensor(rows) else rows)
        if numbers.ndim != 1 or (len(numbers) and numbers.dtype.kind not in "iu"):
            hint = "; for a mask, pass np.flatnonzero(mask)" if numbers.dtype.kind == "b" else ""
            raise InvalidRecord(f"step {self.step}, rows: got {shown(rows)}; pass a list of row numbers{hint}")
        numbers = numbers.astype(np.int64)
        if len(numbers) and not (numbers.min() >= 0 and numbers.max() < len(self)):
            raise InvalidRecord(f"step {self.step}, rows: got {rows!r:.80}; pass row numbers from 0 to {len(self) - 1}")
        if len(np.unique(numbers)) != len(numbers):
            raise InvalidRecord(f"step {self.step}, rows: got {rows!r:.80}; give each row number only once")
        return numbers

    def captured_rows(self, captured: Any, scored: np.ndarray) -> np.ndarray:
        numbers = self.rows(captured)
        strangers = np.setdiff1d(numbers, scored)
        if len(strangers):
            raise InvalidRecord(
                f"step {self.step}, captured_rows: row {strangers[0]} is not among the scored rows. Pass its "
                "logprobs in the same call"
            )
        return numbers

    def next_iteration(self, pass_name: str, rows: np.ndarray) -> np.ndarray:
        """Record that the pass scores these rows, and return how many times it had scored each row before."""
        counts = self._rounds.setdefault(pass_name, np.zeros(len(self), np.int32))
        iteration = np.array(counts[rows])
        if pass_name != CURRENT and iteration.any():
            row = int(rows[np.flatnonzero(iteration)[0]])
            raise InvalidRecord(
                f"step {self.step}, {self.label(row)}: pass {pass_name!r} has already scored this sequence. Each "
                f"pass scores a sequence once, except {CURRENT!r}, which scores it once per inner iteration"
            )
        counts[rows] += 1
        return iteration

    def take_back(self, pass_name: str, rows: np.ndarray) -> None:
        self._rounds[pass_name][rows] -= 1


@dataclass(slots=True, kw_only=True)
class SequenceNames:
    step: int | None = None
    known: dict[int, set[str]] = field(default_factory=dict)
    count: int = 0

    def add(self, step: int, names: list[str], *, ordered: bool) -> set[str]:
        by_step = {} if ordered and step != self.step else self.known
        known = by_step.get(step, set())
        if len(set(names)) != len(names) or not known.isdisjoint(names):
            name = next(name for row, name in enumerate(names) if name in known or name in names[:row])
            raise InvalidRecord(
                f"step {step}, sequence {name!r} occurs twice. Each seq_id must be unique within a step"
            )
        known.update(names)
        by_step[step] = known
        self.known, self.step = by_step, step
        self.count += len(names)
        return known


MIN_RUN = 2
"""Suspect padding if a row starts or ends with this many identical tokens. A run of one is usually the end token."""
MIN_LONGEST_RUN = 4
"""Warn only if the batch's longest run of identical tokens is at least this long. Shorter runs occur by chance."""
MIN_SHARE = 0.25
"""Warn only if at least this share of rows start or end with the same repeated token."""


def padding_of(mask: Any, ids: Any, side: str, where: str, warn: Callable[[str, str], None] | None) -> Padding | None:
    """Return the padding that a mask describes, or None if there is no mask. Warns if ids without a mask look padded.

    `side` is `response` or `prompt`. `warn` takes a key and a text, and reports each key once. If `warn` is None, as
    for framework data, empty rows are not reported.
    """
    name = f"{side}_attention_mask"
    if mask is None:
        if warn and is_padded(ids) and (sentence := unmasked_padding(ids, f"{where}, {side}_ids", name)):
            warn(name, sentence)
        return None
    if not is_padded(ids):
        came = "not given" if ids is None else "given as lists, which have no padding"
        raise InvalidRecord(
            f"{where}, {name}: {side}_ids were {came}. Pass {side}_ids as a tensor or array [B, T] with the mask, "
            "or as lists without the mask"
        )
    padding = Padding.of(mask, f"{where}, {name}")
    empty = np.flatnonzero(padding.lengths == 0)
    if warn and padding.width and len(empty):
        if len(empty) == len(padding.lengths):
            raise InvalidRecord(f"{where}, {name}: contains only 0, so no row has a token. Pass 1 for each token")
        warn(
            f"{name} of empty rows",
            f"{where}, {name}: row {empty[0]} contains only 0 ({len(empty)} of {len(padding.lengths)} rows do), so it "
            f"is recorded without tokens. To exclude tokens from the loss, use response_mask instead",
        )
    return padding


def unmasked_padding(ids: Any, what: str, mask_name: str) -> str | None:
    cells = to_numpy(ids)
    if cells.ndim != 2 or cells.shape[1] < 2 or len(cells) < 2 or cells.dtype.kind not in "iuf":
        return None
    for side, outward in (("begin", cells), ("end", cells[:, ::-1])):
        edge_B, other = outward[:, 0], outward != outward[:, :1]
        run_B = np.where(other.any(axis=1), other.argmax(axis=1), cells.shape[1])
        repeats = run_B >= MIN_RUN
        if not repeats.any() or repeats.all():
            continue
        tokens, counts = np.unique(edge_B[repeats], return_counts=True)
        token = tokens[counts.argmax()]
        padded = repeats & (edge_B == token)
        longest = int(run_B[padded].max())
        if padded.mean() >= MIN_SHARE and longest >= MIN_LONGEST_RUN:
            return (
                f"{what}: {padded.sum()} of {len(cells)} rows {side} with up to {longest} repeats of token {token}, "
                f"which looks like padding. Without {mask_name}, every cell is recorded as a token. Pass that mask, or "
                f"lists without padding"
            )
    return None
