"""Choose the loss, and the passes that serve as trainer, engine and current policy."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...schemas.errors import InvalidOption, InvalidRecord
from ...schemas.loss import (
    CISPO,
    PPO,
    REINFORCE,
    SAPO,
    SEQUENCE_MEAN,
    SEQUENCE_SUM,
    TOKEN,
    VESPO,
    Loss,
    parse_loss,
    read_loss,
)
from ...schemas.passes import CURRENT, ROLLOUT, TRAIN
from ..statement import Statement
from ..statistics.intervals import unit
from ..trace.columns import passes_with, read_hyperparameters, sequence_columns
from ..trace.database import Database
from ..trace.tokens import PassRows, token_query

MISMATCH, DRIFT, ADVANTAGE = "mismatch", "drift", "advantage"
"""Data that a figure needs. MISMATCH means logprobs from the engine and from the trainer at the sampling weights. DRIFT
means logprobs from the trainer at the sampling weights and from the current policy in the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRoles:
    train: str
    rollout: str
    current: str
    loss: Loss
    known: frozenset[str]
    """The recorded data: any of MISMATCH, DRIFT and ADVANTAGE."""
    notes: tuple[Statement, ...]
    cannot: tuple[Statement, ...]


def choose_sides(database: Database, loss: Loss) -> PassRoles | None:
    """Choose the pass for each role, or a substitute if that pass is missing. Return None if neither `train` nor
    `current` has logprobs."""
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
    """Return the roles whose passes must be read. A role that uses the same pass as `train` is left out."""
    has = {"train": True, "rollout": sides.rollout != sides.train, "now": sides.current != sides.train}
    return tuple(name for name, is_read in has.items() if is_read)


def batch_query(sides: PassRoles, steps: range) -> str:
    """Return a query for one row per sequence and inner loss iteration within `steps`, including sequences without tokens.

    For speed, `sequence`, `unit` (the sequence's group) and `micro_batch` are hashes of names. `is_whole` is true if
    the response has tokens and every pass has one logprob per token.
    """
    names = names_of(sides)
    now = names[-1] if names[-1] == "now" else "train"
    scored = {"train": sides.train, "rollout": sides.rollout, "now": sides.current}
    lengths = " AND ".join(f"coalesce(len({name}.logprobs) = s.num_response_tokens, false)" for name in names)
    passes = {
        name: PassRows(name=scored[name], iteration=None if name == now else 0, scored=False, optional=name != now)
        for name in names
    }
    return token_query(
        passes,
        [
            "s.step", f"{now}.iteration", "hash(s.seq_id) AS sequence", f"{unit('s')} AS unit", "s.num_response_tokens",
            f"CASE WHEN {now}.forward_id IS NULL THEN 0::UBIGINT ELSE hash({now}.writer, {now}.forward_id) END AS micro_batch",
            f"s.num_response_tokens > 0 AND {lengths} AS is_whole",
        ],
        steps=steps,
        lists=["advantage", "advantages", "mask"],
    )  # fmt: skip


LOSSES = {
    "ppo_clip": Loss(kind=PPO, level=TOKEN),
    "reinforce": Loss(kind=REINFORCE, level=TOKEN),
    "gspo": Loss(kind=PPO, level=SEQUENCE_MEAN, aggregation="sequence_mean", clip_low=3e-4, clip_high=4e-4),
    "rloo": Loss(kind=PPO, level=SEQUENCE_SUM, aggregation="sequence"),
    "cispo": Loss(kind=CISPO, level=TOKEN, clip_high=5.0),
    "sapo": Loss(kind=SAPO, level=TOKEN, aggregation="sequence_mean"),
    "vespo": Loss(kind=VESPO, level=SEQUENCE_SUM),
}
"""Default fields of each loss. gspo's bounds are from arXiv 2507.18071 (section 5.1). cispo's bound is TRL's
recommendation, after arXiv 2510.13786."""


def choose_loss(database: Database, text: str | None) -> tuple[Loss, tuple[Statement, ...]]:
    """Return the loss, and statements that say where its settings come from (see sentences.loss_basis).

    `text` may name a key of LOSSES and set fields of Loss, as in `gspo,clip_high=0.01`. Other fields keep their
    recorded values. If the recorded loss has another kind or level, only its denominator and correction are kept. If no
    loss was recorded, PPO with a clip of 0.2 is assumed. Raises InvalidOption.
    """
    loss, basis = _recorded(database)
    is_recorded, loss = loss is not None, loss or Loss()
    parts = [part.strip() for part in (text or "").split(",") if part.strip()]
    changed = [part for part in parts if "=" in part]
    for name in (part for part in parts if "=" not in part):
        if name not in LOSSES:
            raise InvalidOption(f"got {name!r}; use one of {', '.join(LOSSES)}, or FIELD=VALUE", option="loss")
        known = LOSSES[name]
        if not is_recorded or (loss.kind, loss.level) != (known.kind, known.level):
            loss = replace(
                known, denominator=loss.denominator, correction=loss.correction, correction_low=loss.correction_low,
                correction_high=loss.correction_high,
            )  # fmt: skip
        basis = Statement(code="asked")
    if not changed:
        return loss, (basis,)
    loss = parse_loss(",".join(changed), loss)
    for name in (part.partition("=")[0].strip().replace("-", "_") for part in changed):
        value = getattr(loss, name)
        if isinstance(value, float) and not value >= 0:
            raise InvalidOption(f"{name}: got {value}; pass a non-negative number", option="loss")
    asked = ", ".join(part.replace("=", " ") for part in changed)
    return loss, (basis, Statement(code="fields_asked", values={"fields": asked}))


def _recorded(database: Database) -> tuple[Loss | None, Statement]:
    try:
        loss = read_loss(read_hyperparameters(database))
    except (InvalidRecord, ValueError) as error:
        return None, Statement(code="unreadable", values={"error": str(error)})
    return loss, Statement(code="recorded" if loss else "not_recorded")
