"""Choose the loss to analyze: the recorded one, overridden by the requested options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

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
from ..statement import Statement
from ..trace.database import Database
from ..trace.hyperparameters import read_hyperparameters

LOSSES: Mapping[str, Mapping[str, Any]] = {
    "ppo_clip": {"kind": PPO, "level": TOKEN},
    "reinforce": {"kind": REINFORCE, "level": TOKEN},
    "gspo": {"kind": PPO, "level": SEQUENCE_MEAN, "aggregation": "sequence_mean", "clip_low": 3e-4, "clip_high": 4e-4},
    "rloo": {"kind": PPO, "level": SEQUENCE_SUM, "aggregation": "sequence"},
    "cispo": {"kind": CISPO, "level": TOKEN, "clip_high": 5.0},
    "sapo": {"kind": SAPO, "level": TOKEN, "aggregation": "sequence_mean"},
    "vespo": {"kind": VESPO, "level": SEQUENCE_SUM},
}
"""Name of a loss -> fields of Loss used if neither the trace nor an option sets them. The bounds of gspo are from arXiv
2507.18071 (section 5.1); the bound of cispo is TRL's recommendation, after arXiv 2510.13786."""


def choose_loss(database: Database, text: str | None) -> tuple[Loss, tuple[Statement, ...]]:
    """Return the loss and where it comes from, as codes of sentences.loss_basis.

    `text` may name a key of LOSSES and set fields of Loss, as `gspo,clip_high=0.01`. Other fields keep the recorded value;
    without one, the loss is PPO with a clip of 0.2. Raises InvalidOption.
    """
    loss, basis = _recorded(database)
    is_recorded, loss = loss is not None, loss or Loss()
    parts = [part.strip() for part in (text or "").split(",") if part.strip()]
    changed = [part for part in parts if "=" in part]
    for name in (part for part in parts if "=" not in part):
        if name not in LOSSES:
            raise InvalidOption(f"got {name!r}; use {', '.join(LOSSES)}, or name=value for a field", option="loss")
        known = LOSSES[name]
        same = is_recorded and all(getattr(loss, key) == known[key] for key in ("kind", "level"))
        loss = loss if same else replace(_neutral(loss), **known)
        basis = Statement(code="asked")
    if not changed:
        return loss, (basis,)
    loss = parse_loss(",".join(changed), loss)
    for name in (part.partition("=")[0].strip().replace("-", "_") for part in changed):
        value = getattr(loss, name)
        if isinstance(value, float) and not value >= 0:
            raise InvalidOption(f"{name}: got {value}; give a number of at least 0", option="loss")
    asked = ", ".join(part.replace("=", " ") for part in changed)
    return loss, (basis, Statement(code="fields_asked", values={"fields": asked}))


def _recorded(database: Database) -> tuple[Loss | None, Statement]:
    try:
        loss = read_loss(read_hyperparameters(database))
    except (InvalidRecord, ValueError) as error:
        return None, Statement(code="unreadable", values={"error": str(error)})
    return loss, Statement(code="recorded" if loss else "not_recorded")


def _neutral(loss: Loss) -> Loss:
    """Return the loss with its bounds reset, for a change to another kind of loss; denominator and correction are
    kept."""
    return Loss(
        denominator=loss.denominator, correction=loss.correction,
        correction_low=loss.correction_low, correction_high=loss.correction_high,
    )  # fmt: skip
