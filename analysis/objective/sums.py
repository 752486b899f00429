"""Sums over each sequence's tokens, from one pass over the trace.

Shapes: R rows (sequence and inner iteration), N of them comparable, U updates (step and inner iteration), C columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa

from ...schemas.loss import Loss
from ...tracer.progress import Progress
from ..statistics.estimators import Array
from ..statistics.moments import centred, co_moment
from ..trace.database import Database
from ..trace.ragged import Tokens, array_of, blocks, counted
from ..trace.tokens import CHUNK_TOKENS, spread, step_ranges, tokens_by_step, tokens_of_rows, unit_tokens
from .loss_terms import SIDES, Differences, terms_of
from .pass_roles import PassRoles, batch_query, names_of

TOKEN_COLUMNS = (
    "num_tokens", "num_nan", "num_inf", "sum_d", "sum_abs_d", "sum_d2", "sum_drift", "sum_drift2", "mean_d", "mean_drift",
    "spread_d", "spread_drift", "spread_d_drift", "num_bad", "num_bad_mismatch", "advantage",
)  # fmt: skip
"""Sums over a sequence's unmasked tokens with finite logprobs in every pass.

    num_nan, num_inf   unmasked tokens with a NaN or infinite logprob
    d, drift           train - rollout, current - train (nats)
    spread             sums of squares and products of deviations from the sequence's means
    num_bad            tokens with A < 0 and p(rollout) - p(current) >= 0.5
    num_bad_mismatch   the same with p(train) instead of p(current)
    advantage          mean advantage, not a sum
"""

SIGNED_COLUMNS = (
    "size", "used", "plain", "abs_plain", "applied", "abs_applied", "unclipped", "clipped", "to_clipped", "to_free",
)  # fmt: skip
"""Sums over terms, split by the advantage's sign. Sizes and biases are multiplied by the term's token count.

size: |f(rho*)|. used: w f(rho_used), with the loss's correction weight w. plain: f(rho_used) - f(rho*). applied: w
f(rho_used) - f(rho*). unclipped: A (w rho_used - rho*). clipped: terms clipped under rho*. to_clipped: terms clipped
only under rho_used. to_free: terms clipped only under rho*.
"""

COLUMNS = (*TOKEN_COLUMNS, *(f"{name}_{side}" for name in SIGNED_COLUMNS for side in SIDES), "terms_known")
"""Names of all columns. `terms_known` is the number of terms with an advantage."""


def sequence_sums(loss: Loss, tokens: Tokens) -> np.ndarray:
    found, parts = compared(tokens)
    found |= {
        "sum_d": parts.total(parts.d_T), "sum_abs_d": parts.total(np.abs(parts.d_T)),
        "sum_d2": parts.total(parts.d_T * parts.d_T), "sum_drift": parts.total(parts.drift_T),
        "sum_drift2": parts.total(parts.drift_T * parts.drift_T), "advantage": parts.advantage_N,
    }  # fmt: skip
    found |= _spreads(parts)
    found |= _bad(tokens, parts)
    found |= terms_of(loss, parts).sums(loss)
    return np.stack([found[name] for name in COLUMNS])


def _spreads(parts: Differences) -> dict[str, Array]:
    d, drift = (centred(side_T, parts.starts_N, parts.num_N, parts.counts_T) for side_T in (parts.d_T, parts.drift_T))
    sums = {"mean_d": d.mean_N, "mean_drift": drift.mean_N}
    for name, one, other in (("d", d, d), ("drift", drift, drift), ("d_drift", d, drift)):
        sums[f"spread_{name}"] = co_moment(one, other, parts.starts_N, parts.num_N)
    return sums


def compared(tokens: Tokens) -> tuple[dict[str, Array], Differences]:
    """Return each sequence's token counts, and the log-ratios and advantages of its tokens."""
    train_T, rollout_T, now_T = _passes(tokens)
    d_T, drift_T = train_T - rollout_T, now_T - train_T
    assert tokens.advantage_N is not None
    has_one, starts_N = tokens.advantage_T is None, tokens.starts_N
    own_T = np.repeat(tokens.advantage_N, tokens.lengths_N) if tokens.advantage_T is None else tokens.advantage_T
    fine_T = np.isfinite(d_T + drift_T)
    lengths_N, none_N = tokens.lengths_N.astype(np.float64), np.zeros(len(starts_N))
    counts = {"num_tokens": lengths_N, "num_nan": none_N, "num_inf": none_N}
    counts_T, known_T, known_N, advantage_T = None, None, lengths_N, own_T
    if tokens.counted_T is not None or not fine_T.all() or not np.isfinite(own_T).all():
        there_T = np.ones(len(d_T), bool) if tokens.counted_T is None else tokens.counted_T
        nan_T = there_T & (np.isnan(train_T) | np.isnan(rollout_T) | np.isnan(now_T))
        flags = {"num_tokens": there_T & fine_T, "num_nan": nan_T, "num_inf": there_T & ~fine_T & ~nan_T}
        counts = {name: np.add.reduceat(flag.astype(np.float64), starts_N) for name, flag in flags.items()}
        counts_T = flags["num_tokens"]
        known_T = counts_T & np.isfinite(own_T)
        known_N = np.add.reduceat(known_T.astype(np.float64), starts_N)
        d_T, drift_T = (np.where(counts_T, values, 0.0) for values in (d_T, drift_T))
        advantage_T = np.where(known_T, own_T, 0.0)
    mean_N = np.where(np.isfinite(tokens.advantage_N) & (known_N > 0), tokens.advantage_N, 0.0)
    if not has_one:
        mean_N = np.add.reduceat(advantage_T, starts_N) / np.maximum(known_N, 1)
    return counts, Differences(
        d_T=d_T, drift_T=drift_T, advantage_T=advantage_T, counts_T=counts_T, known_T=known_T,
        num_N=counts["num_tokens"], known_N=known_N, advantage_N=mean_N, has_one=has_one, starts_N=starts_N,
        lengths_N=tokens.lengths_N,
    )  # fmt: skip


def _bad(tokens: Tokens, parts: Differences) -> dict[str, Array]:
    """Count bad updates (arXiv 2602.04879): tokens with A < 0 whose probability has dropped by at least 0.5."""
    train_T, rollout_T, now_T = _passes(tokens)
    likely = np.flatnonzero((rollout_T >= np.log(0.5)) & (parts.advantage_T < 0))
    counts = {}
    for name, side_T in (("num_bad", now_T), ("num_bad_mismatch", train_T)):
        bad = likely[np.exp(rollout_T[likely]) - np.exp(side_T[likely]) >= 0.5]
        rows = np.searchsorted(parts.starts_N, bad, "right") - 1
        counts[name] = np.bincount(rows, minlength=len(parts.starts_N)).astype(np.float64)
    return counts


def _passes(tokens: Tokens) -> tuple[Array, Array, Array]:
    """Return the logprobs of trainer, engine and current policy. If a pass is missing, the trainer's logprobs are
    used."""
    train_T = tokens.logprobs["train"]
    return train_T, tokens.logprobs.get("rollout", train_T), tokens.logprobs.get("now", train_T)


_KEYS = {
    "step": np.int64, "iteration": np.int64, "sequence": np.uint64, "unit": np.uint64, "micro_batch": np.uint64,
}  # fmt: skip


TOKEN_MEANS = ("token_mean", "batch_token_mean", "micro_token_mean")


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSums:
    """Arrays [N] of sums, with one element per comparable row, in a fixed order."""

    unit_N: np.ndarray
    """Hash of the row's group (group_id and step), or of its sequence if it has no group."""
    updates: list[tuple[int, int]]
    update_N: np.ndarray
    share_N: Array
    """The loss's weight for each token in the row."""
    num_rows_U: np.ndarray
    """Number of sequences in each update's loss, including those without a comparable token."""
    micro_batches_known: bool
    columns: dict[str, Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    keys: dict[str, np.ndarray]
    is_whole_R: np.ndarray
    """True if the row's logprobs can be compared."""
    num_tokens_R: np.ndarray
    columns_CN: np.ndarray
    num_read: int


def read_sequence_sums(database: Database, sides: PassRoles, progress: Progress) -> SequenceSums:
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
    # Indices of the comparable rows, in sorted order.
    whole_N = order[is_whole_R[order]]
    column_N = (np.cumsum(is_whole_R) - 1)[whole_N]
    table_CN = np.concatenate([np.zeros((len(COLUMNS), 0)), *(batch.columns_CN for batch in batches)], axis=1)
    updates, update_N = _updates(keys["step"][whole_N], keys["iteration"][whole_N])
    all_updates, update_R = _updates(keys["step"], keys["iteration"])
    rows = LossRows(update_R=update_R, num_tokens_R=num_tokens_R, micro_batch_R=keys["micro_batch"])
    places = {update: place for place, update in enumerate(all_updates)}
    columns = dict(zip(COLUMNS, table_CN[:, column_N], strict=True))
    share_N = shares(sides.loss, rows)[whole_N]
    if sides.loss.aggregation == "sequence":  # the sums multiply each term by its number of tokens
        share_N = share_N / np.maximum(columns["num_tokens"], 1)
    return SequenceSums(
        unit_N=keys["unit"][whole_N], updates=updates, update_N=update_N, share_N=share_N,
        num_rows_U=rows.num_rows_U[[places[update] for update in updates]],
        micro_batches_known=bool(knows_micro_batches(rows).all()), columns=columns,
    )  # fmt: skip


def _concatenated(parts: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *parts])


def _updates(step_N: np.ndarray, iteration_N: np.ndarray) -> tuple[list[tuple[int, int]], np.ndarray]:
    pairs, place_N = np.unique(np.stack([step_N, iteration_N]).astype(np.int64), axis=1, return_inverse=True)
    return [(int(step), int(iteration)) for step, iteration in pairs.T], place_N.reshape(-1)


def _of_range(database: Database, unit: tuple[PassRoles, range]) -> Iterator[_Batch]:
    sides, steps = unit
    yield from database.connection.mapped_batches(batch_query(sides, steps), partial(_of_batch, sides))


def _of_batch(sides: PassRoles, rows: pa.RecordBatch) -> _Batch:
    keys = {name: array_of(rows.column(name)) for name in _KEYS}
    is_whole_R = array_of(rows.column("is_whole"))
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
    lengths_R: np.ndarray = array_of(rows.column("num_response_tokens")).astype(np.int64)
    counted_T = counted(rows.column("mask"), lengths_R)
    if counted_T is None:
        return lengths_R
    before = np.concatenate([[0], np.cumsum(counted_T)])
    ends_R = np.cumsum(lengths_R)
    return np.asarray(before[ends_R] - before[ends_R - lengths_R])


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRows:
    """Arrays [R] for all rows that went through the loss. They determine the denominators in the loss."""

    update_R: np.ndarray
    num_tokens_R: np.ndarray
    """Number of unmasked tokens in the row, with or without logprobs."""
    micro_batch_R: np.ndarray

    @property
    def num_rows_U(self) -> np.ndarray:
        return np.bincount(self.update_R)


def shares(loss: Loss, rows: LossRows) -> Array:
    """Return the weight that the loss gives to each token in a row, [R].

    With aggregation `sequence`, this is the weight of the row's only term. An update without
    recorded micro-batches is treated as one batch.
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
    """Return, for each update [U], whether all its rows have a recorded micro-batch."""
    return np.asarray(np.bincount(rows.update_R, rows.micro_batch_R == 0) == 0)


def _of_micro_batches(rows: LossRows) -> Array:
    """Return, for each row [R], the number of tokens in its micro-batch times the number of micro-batches in its
    update."""
    keys = np.stack([rows.update_R.astype(np.uint64), rows.micro_batch_R.astype(np.uint64)])
    (update_M, _), micro_R = np.unique(keys, axis=1, return_inverse=True)
    micro_R = micro_R.reshape(-1)
    tokens_M = np.maximum(np.bincount(micro_R, rows.num_tokens_R), 1)
    num_U = np.bincount(update_M.astype(np.int64), minlength=int(rows.update_R.max(initial=-1)) + 1)
    return np.asarray(tokens_M[micro_R] * num_U[rows.update_R])
