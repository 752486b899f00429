"""Compute the sums of every sequence while reading the tokens once.

Shapes: R rows (sequence and inner iteration), of which N are comparable; U updates (step and inner iteration), C columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from ...schemas.loss import Loss
from ...tracer.progress import Progress
from ..statistics.estimators import Array
from ..trace.connection import mapped, num_threads
from ..trace.database import Database
from ..trace.ragged import blocks, counted
from ..trace.spread import spread, unit_tokens
from ..trace.tokens import CHUNK_TOKENS, step_ranges, tokens_by_step, tokens_of_rows
from .pass_roles import PassRoles, names_of, read_batches
from .sequence_sums import COLUMNS, sequence_sums

_KEYS = {
    "step": np.int64, "iteration": np.int64, "sequence": np.uint64, "unit": np.uint64, "micro_batch": np.uint64,
}  # fmt: skip


TOKEN_MEANS = ("token_mean", "batch_token_mean", "micro_token_mean")


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSums:
    """Sums as [N] arrays with one element per comparable row, in a fixed order."""

    unit_N: np.ndarray
    """Number of the group (group_id and step) that the row belongs to, or of the sequence itself if it has no group."""
    updates: list[tuple[int, int]]
    """[U] (step, inner iteration)."""
    update_N: np.ndarray
    """Index in `updates` of the update that the row belongs to."""
    share_N: Array
    """Factor that the loss applies to each token's term within its update."""
    num_rows_U: np.ndarray
    """Number of sequences that went through the loss, including sequences without a comparable token."""
    micro_batches_known: bool
    """True if the micro-batch of every sequence was recorded."""
    columns: dict[str, Array]
    """Column named in sequence_sums.COLUMNS -> [N] sums."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """The sums of a batch of sequences."""

    keys: dict[str, np.ndarray]
    """Name in _KEYS -> [R] keys."""
    is_whole_R: np.ndarray
    """bool: True if the logprobs of the row are comparable, which makes it one of the N rows."""
    num_tokens_R: np.ndarray
    """Number of tokens that count in the loss."""
    columns_CN: np.ndarray
    num_read: int


def read_sequence_sums(database: Database, sides: PassRoles, progress: Progress) -> SequenceSums:
    """Read every token once, and return the sums of every sequence."""
    batches: list[_Batch] = []
    tokens = tokens_by_step(database)
    num_tokens = sum(tokens.values())
    units = [(sides, steps) for steps in step_ranges(tokens, unit_tokens(database, CHUNK_TOKENS, num_tokens))]
    with progress("reading tokens", num_tokens) as advance:
        for batch in spread(database, _of_range, units):
            advance(batch.num_read)
            batches.append(batch)
    keys = {name: _concatenated([batch.keys[name] for batch in batches], _KEYS[name]) for name in _KEYS}
    is_whole_R = _concatenated([batch.is_whole_R for batch in batches], np.bool_)
    num_tokens_R = _concatenated([batch.num_tokens_R for batch in batches], np.int64)
    order = np.lexsort((keys["sequence"], keys["iteration"], keys["step"]))
    # Indices of comparable rows, in sorted order.
    whole_N = order[is_whole_R[order]]
    column_N = (np.cumsum(is_whole_R) - 1)[whole_N]
    table_CN = np.concatenate([np.zeros((len(COLUMNS), 0)), *(batch.columns_CN for batch in batches)], axis=1)
    updates, update_N = _updates(keys["step"][whole_N], keys["iteration"][whole_N])
    all_updates, update_R = _updates(keys["step"], keys["iteration"])
    rows = LossRows(update_R=update_R, num_tokens_R=num_tokens_R, micro_batch_R=keys["micro_batch"])
    places = {update: place for place, update in enumerate(all_updates)}
    columns = dict(zip(COLUMNS, table_CN[:, column_N], strict=True))
    share_N = shares(sides.loss, rows)[whole_N]
    if sides.loss.aggregation == "sequence":  # its single term represents the compared tokens
        share_N = share_N / np.maximum(columns["num_tokens"], 1)
    return SequenceSums(
        unit_N=keys["unit"][whole_N], updates=updates, update_N=update_N, share_N=share_N,
        num_rows_U=rows.num_rows_U[[places[update] for update in updates]],
        micro_batches_known=bool(knows_micro_batches(rows).all()), columns=columns,
    )  # fmt: skip


def _concatenated(parts: list[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *parts])


def _updates(step_N: np.ndarray, iteration_N: np.ndarray) -> tuple[list[tuple[int, int]], np.ndarray]:
    """Return the sorted distinct (step, inner iteration) pairs, and the index in them for each row."""
    pairs, place_N = np.unique(np.stack([step_N, iteration_N]).astype(np.int64), axis=1, return_inverse=True)
    return [(int(step), int(iteration)) for step, iteration in pairs.T], place_N.reshape(-1)


def _of_range(database: Database, unit: tuple[PassRoles, range]) -> Iterator[_Batch]:
    """Yield the sums of one step range; the ranges of different units do not overlap."""
    sides, steps = unit
    with ThreadPoolExecutor(num_threads()) as pool:
        yield from mapped(pool, partial(_of_batch, sides), read_batches(database, sides, steps))


def _of_batch(sides: PassRoles, rows: pa.RecordBatch) -> _Batch:
    keys = {name: rows.column(name).to_numpy() for name in _KEYS}
    is_whole_R = rows.column("is_whole").to_numpy(zero_copy_only=False)
    whole = rows if is_whole_R.all() else rows.filter(rows.column("is_whole"))
    parts = [np.zeros((len(COLUMNS), 0))]
    tokens = tokens_of_rows(whole, names_of(sides))
    with np.errstate(all="ignore"):
        for sequences, span, _ in blocks(tokens.lengths_N):
            parts.append(sequence_sums(sides.loss, tokens.cut(sequences, span)))
    return _Batch(
        keys=keys, is_whole_R=is_whole_R, num_tokens_R=_num_counted(rows), columns_CN=np.concatenate(parts, axis=1),
        num_read=int(tokens.lengths_N.sum()),
    )  # fmt: skip


def _num_counted(rows: pa.RecordBatch) -> np.ndarray:
    """Return [R] the number of tokens that the loss counts according to the mask alone."""
    lengths_R: np.ndarray = rows.column("num_response_tokens").to_numpy().astype(np.int64)
    counted_T = counted(rows.column("mask"), lengths_R)
    if counted_T is None:
        return lengths_R
    before = np.concatenate([[0], np.cumsum(counted_T)])
    ends_R = np.cumsum(lengths_R)
    return np.asarray(before[ends_R] - before[ends_R - lengths_R])


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRows:
    """[R] arrays over all rows that went through the loss, which determine the divisors of the loss."""

    update_R: np.ndarray
    """Index of the update that the row belongs to."""
    num_tokens_R: np.ndarray
    """Number of tokens that count in the loss according to the mask alone."""
    micro_batch_R: np.ndarray
    """Number of the micro-batch; 0 if not recorded."""

    @property
    def num_rows_U(self) -> np.ndarray:
        """Number of sequences in each update."""
        return np.bincount(self.update_R)


def shares(loss: Loss, rows: LossRows) -> Array:
    """Return the [R] factor that the loss applies to each token's term or, with aggregation `sequence`, to each
    sequence's term.

    An update in which some micro-batches were not recorded is treated as one batch.
    """
    update_R = rows.update_R
    if loss.aggregation in TOKEN_MEANS:
        tokens_U = np.bincount(update_R, rows.num_tokens_R)
        divisor_R = np.maximum(tokens_U, 1)[update_R]
        if loss.aggregation == "micro_token_mean":
            divisor_R = np.where(knows_micro_batches(rows)[update_R], _of_micro_batches(rows), divisor_R)
    else:
        divisor_R = rows.num_rows_U[update_R].astype(np.float64)
    if loss.aggregation == "sequence_mean":
        divisor_R = divisor_R * np.maximum(rows.num_tokens_R, 1)
    elif loss.aggregation == "constant":
        divisor_R = divisor_R * (loss.max_tokens or 1)
    return np.asarray(1 / divisor_R, np.float64)


def knows_micro_batches(rows: LossRows) -> np.ndarray:
    """Return [U] bool: True if the micro-batch of every row was recorded."""
    return np.asarray(np.bincount(rows.update_R, rows.micro_batch_R == 0) == 0)


def _of_micro_batches(rows: LossRows) -> Array:
    """Return [R] the number of tokens in the row's micro-batch, times the number of micro-batches in the row's
    update."""
    keys = np.stack([rows.update_R.astype(np.uint64), rows.micro_batch_R.astype(np.uint64)])
    (update_M, _), micro_R = np.unique(keys, axis=1, return_inverse=True)
    micro_R = micro_R.reshape(-1)
    tokens_M = np.maximum(np.bincount(micro_R, rows.num_tokens_R), 1)
    num_U = np.bincount(update_M.astype(np.int64), minlength=int(rows.update_R.max(initial=-1)) + 1)
    return np.asarray(tokens_M[micro_R] * num_U[rows.update_R])
