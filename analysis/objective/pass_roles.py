"""Which passes stand for the trainer at the sampling weights, the engine, and the policy inside the loss."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...schemas.loss import CURRENT, ROLLOUT, TRAIN, Loss
from ..trace.columns import passes_with, sequence_columns
from ..trace.database import Database

MISMATCH, DRIFT, ADVANTAGE = "mismatch", "drift", "advantage"
"""What a figure needs: both sides at the sampling weights; the policy inside the loss beside the trainer's; advantages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRoles:
    """The passes that are read, and what they can answer."""

    train: str
    rollout: str
    current: str
    """The pass inside the loss; the same as `train` where it was not recorded."""
    loss: Loss
    known: frozenset[str]
    """Of MISMATCH, DRIFT and ADVANTAGE those that the trace answers."""
    notes: tuple[str, ...]
    cannot: tuple[str, ...]
    """What cannot be answered, and what would have to be recorded, a sentence each."""


def choose_sides(database: Database, loss: Loss) -> PassRoles | None:
    """The passes to read, one standing in for another where that one was not recorded; None where no pass can be read."""
    there = passes_with(database, "logprobs", of=(TRAIN, ROLLOUT, CURRENT))
    if not there or there == {ROLLOUT}:
        return None
    notes, cannot, known = [], [], {MISMATCH, DRIFT}
    train = TRAIN if TRAIN in there else CURRENT
    current = CURRENT if CURRENT in there else TRAIN
    rollout = ROLLOUT
    if ROLLOUT not in there:
        rollout = train
        known.discard(MISMATCH)
        cannot.append(f"what the mismatch does: the trace has no logprobs of the pass {ROLLOUT!r}")
    if TRAIN not in there:
        known.discard(DRIFT)
        notes.append(
            f"the trace has no pass {TRAIN!r}: {CURRENT!r} stands for it, so that what the updates since sampling moved counts "
            "as mismatch here"
        )
        cannot.append("what of the ratio is mismatch and what is policy drift: record the pass 'train' for that")
        if loss.denominator == TRAIN:
            loss = replace(loss, denominator=CURRENT)
    if CURRENT not in there:
        known.discard(DRIFT)
        notes.append(
            f"the trace has no pass {CURRENT!r}: figures are of a batch's first update, where the policy inside the loss is "
            "the trainer's own and the used ratio is 1 unless the loss divides by the rollout's"
        )
        cannot.append("what later updates on the same batch do, and policy drift: record the pass 'current' for that")
    has = sequence_columns(database)
    if has.advantage or has.advantages:
        known.add(ADVANTAGE)
    else:
        cannot.append("everything that an advantage enters: record them with Recorder.add_sequences(advantage=...)")
    return PassRoles(
        train=train, rollout=rollout, current=current, loss=loss, known=frozenset(known), notes=tuple(notes),
        cannot=tuple(cannot),
    )  # fmt: skip
