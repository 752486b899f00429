"""Choose the loss to analyze: the recorded one, overridden by the requested options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
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


def choose_loss(database: Database, options: Mapping[str, Any]) -> tuple[Loss, tuple[Statement, ...]]:
    """Return the loss and where it comes from, as codes of sentences.loss_basis.

    `options` may contain `loss`, a key of LOSSES, and fields of Loss. An option of None keeps the recorded value;
    without one, the loss is PPO with a clip of 0.2. Raises InvalidOption.
    """
    recorded, basis = _recorded(database)
    given = {name: value for name, value in options.items() if value is not None}
    _check(given)
    loss = recorded or Loss()
    if (name := given.pop("loss", None)) is not None:
        known = LOSSES[name]
        same = recorded is not None and all(getattr(recorded, key) == known[key] for key in ("kind", "level"))
        loss = replace(loss if same else _neutral(loss), **({} if same else known))
        basis = Statement(code="asked")
    if given:
        fields_asked = ", ".join(f"{key} {value}" for key, value in given.items())
        return replace(loss, **given), (basis, Statement(code="fields_asked", values={"fields": fields_asked}))
    return loss, (basis,)


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


def _check(given: Mapping[str, Any]) -> None:
    if (name := given.get("loss")) is not None and name not in LOSSES:
        raise InvalidOption(f"got {name!r}; use {', '.join(LOSSES)}", option="loss")
    for key in (
        "clip_low", "clip_high", "clip_hard", "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg",
        "correction_low", "correction_high",
    ):  # fmt: skip
        if key in given and not given[key] >= 0:
            raise InvalidOption(f"got {given[key]}; give a number of at least 0", option=key)
    try:
        Loss(**{name: value for name, value in given.items() if name in {field.name for field in fields(Loss)}})
    except InvalidRecord as error:
        raise InvalidOption(error.message, option=error.option) from error
