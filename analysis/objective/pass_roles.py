"""Which passes stand for the trainer at the sampling weights, the engine, and the policy inside the loss."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...schemas.loss import CURRENT, ROLLOUT, TRAIN, Loss
from ..statement import Statement
from ..trace.database import Database, quoted

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
    notes: tuple[Statement, ...]
    """Of text.NOTES."""
    cannot: tuple[Statement, ...]
    """What cannot be answered, of text.CANNOT."""


def choose_sides(database: Database, loss: Loss) -> PassRoles | None:
    """The passes to read, one standing in for another where that one was not recorded; None where no pass can be read."""
    scored = {name for name in (TRAIN, ROLLOUT, CURRENT) if _is_scored(database, name)}
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
    if _has_advantages(database):
        known.add(ADVANTAGE)
    else:
        cannot.append(Statement(code="no_advantages"))
    return PassRoles(
        train=train, rollout=rollout, current=current, loss=loss, known=frozenset(known), notes=tuple(notes),
        cannot=tuple(cannot),
    )  # fmt: skip


def _is_scored(database: Database, scored: str) -> bool:
    """Whether a pass has logprobs; it reads no more than it takes to find one row."""
    query = f'SELECT step FROM scores WHERE "pass" = {quoted(scored)} AND logprobs IS NOT NULL LIMIT 1'
    return bool(database.connection.execute(query).fetchall())


def _has_advantages(database: Database) -> bool:
    query = "SELECT count(*) FROM sequences WHERE advantage IS NOT NULL OR advantages IS NOT NULL"
    (row,) = database.connection.execute(query).fetchall()
    return bool(row[0])
