"""Choose the passes to use as trainer at the sampling weights, as engine, and as policy inside the loss, and read their
rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pyarrow as pa

from ...schemas.loss import CURRENT, ROLLOUT, TRAIN, Loss
from ..statement import Statement
from ..statistics.intervals import unit
from ..trace.columns import passes_with, sequence_columns
from ..trace.database import Database
from ..trace.tokens import PassRows, token_query

MISMATCH, DRIFT, ADVANTAGE = "mismatch", "drift", "advantage"
"""Data that figures need. MISMATCH: trainer and engine logprobs at the sampling weights; DRIFT: logprobs of the policy
inside the loss and of the trainer; ADVANTAGE: advantages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRoles:
    """The passes to read, and the questions that they can answer."""

    train: str
    rollout: str
    current: str
    """Name of the pass inside the loss; equal to `train` if that pass was not recorded."""
    loss: Loss
    known: frozenset[str]
    """Those of MISMATCH, DRIFT and ADVANTAGE for which the trace has data."""
    notes: tuple[Statement, ...]
    """Caveats: codes of sentences.NOTES."""
    cannot: tuple[Statement, ...]
    """Unanswerable questions: codes of sentences.CANNOT."""


def choose_sides(database: Database, loss: Loss) -> PassRoles | None:
    """Return the passes to read, with substitutes for passes that were not recorded; None if no usable pass was
    recorded."""
    scored = passes_with(database, "logprobs", of=(TRAIN, ROLLOUT, CURRENT))
    if not scored or scored == {ROLLOUT}:
        return None
    notes, cannot, known = [], [], {MISMATCH, DRIFT}
    train = TRAIN if TRAIN in scored else CURRENT
    current = CURRENT if CURRENT in scored else TRAIN
    rollout = ROLLOUT
    if ROLLOUT not in scored:
        rollout = train
        known.discard(MISMATCH)
        cannot.append(Statement(code="no_rollout"))
    if TRAIN not in scored:
        known.discard(DRIFT)
        notes.append(Statement(code="current_for_train"))
        cannot.append(Statement(code="no_train"))
        if loss.denominator == TRAIN:
            loss = replace(loss, denominator=CURRENT)
    if CURRENT not in scored:
        known.discard(DRIFT)
        notes.append(Statement(code="first_update_only"))
        cannot.append(Statement(code="no_current"))
    has = sequence_columns(database)
    if has.advantage or has.advantages:
        known.add(ADVANTAGE)
    else:
        cannot.append(Statement(code="no_advantages"))
    return PassRoles(
        train=train, rollout=rollout, current=current, loss=loss, known=frozenset(known), notes=tuple(notes),
        cannot=tuple(cannot),
    )  # fmt: skip


def names_of(sides: PassRoles) -> tuple[str, ...]:
    """Return the distinct names of the passes to read; there is no `now` if the policy inside the loss has no pass of
    its own."""
    has = {"train": True, "rollout": sides.rollout != sides.train, "now": sides.current != sides.train}
    return tuple(name for name, is_read in has.items() if is_read)


def read_batches(database: Database, sides: PassRoles, steps: range) -> Iterator[pa.RecordBatch]:
    """Yield batches of all sequences that went through the loss in some steps, including sequences without tokens or
    logprobs."""
    yield from database.connection.batches(_query(sides, steps))


def _query(sides: PassRoles, steps: range) -> str:
    """Return the query with one row per sequence and inner iteration of the pass inside the loss.

    `sequence`, `unit` (the group of the sequence) and `micro_batch` are returned as numbers, which are faster than
    names. `is_whole` is true if the response has tokens and every pass has one logprob per token.
    """
    names = names_of(sides)
    now = names[-1] if names[-1] == "now" else "train"
    scored = {"train": sides.train, "rollout": sides.rollout, "now": sides.current}
    lengths = " AND ".join(f"coalesce(len({name}.logprobs) = s.num_response_tokens, false)" for name in names)
    return token_query(
        {
            name: PassRows(
                name=scored[name], iteration=None if name == now else 0, scored=False, optional=name != now
            )
            for name in names
        },
        [
            "s.step", f"{now}.iteration", "hash(s.seq_id) AS sequence", f"{unit('s')} AS unit", "s.num_response_tokens",
            f"CASE WHEN {now}.forward_id IS NULL THEN 0::UBIGINT ELSE hash({now}.writer, {now}.forward_id) END AS micro_batch",
            f"s.num_response_tokens > 0 AND {lengths} AS is_whole",
        ],
        steps=steps,
        lists=["advantage", "advantages", "mask"],
    )  # fmt: skip
