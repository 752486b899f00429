"""Suspect: responses grow or shrink, and what is rewarded or cut off is their length."""

from __future__ import annotations

import math
import shlex
from dataclasses import replace

from ...advice import Advice
from ...dynamics.changes import ChangePoint
from .. import thresholds as t
from ..attribution import Suspect
from ..evidence import Evidence
from ..facts import Facts
from .timing import AFTER, order


def length(facts: Facts) -> Suspect:
    """What speaks for the length of responses."""
    return Suspect(
        code="length",
        evidence=(
            *_moves(facts, t.LENGTH_MOVES_PAID if pays(facts) else t.LENGTH_MOVES),
            *_pays(facts),
            t.prior("length"),
        ),
        next=Advice(
            f"tim-trace query by-length {shlex.quote(facts.trace)}",
            "then rerun with a penalty for overlong responses or a larger max_tokens",
        ),
    )


def pays(facts: Facts) -> bool:
    """Whether longer responses earn more: clearly so, or somewhat while they grow and the reward hides a fall."""
    if facts.pays_length > t.LENGTH_PAYS:
        return True
    change = _first_move(facts, t.LENGTH_MOVES)
    grows = change is not None and change.after > change.before and order(facts, change) != AFTER
    return facts.hides and grows and facts.pays_length > t.LENGTH_PAYS / 2


def _first_move(facts: Facts, least: float) -> ChangePoint | None:
    """The first change after which lengths are that factor away from what they were at first; they may take several."""
    changes = facts.changes.get("length", [])
    return next(
        (
            change
            for change in (replace(each, before=changes[0].before) for each in changes)
            if abs(math.log(max(change.after, 1e-9) / max(change.before, 1e-9))) > math.log(least)
        ),
        None,
    )


def _moves(facts: Facts, least: float) -> list[Evidence]:
    first = _first_move(facts, least)
    if first is None:
        return [Evidence(sentence="the length of responses stays what it was", points=-t.STRONG)]
    said = f"responses go from {first.before:.3g} to {first.after:.3g} tokens from step {first.step} on"
    if order(facts, first) == AFTER:
        return [Evidence(sentence=f"{said}, after the fall began", points=-t.MEDIUM)]
    return [Evidence(sentence=f"{said}, not after the fall", points=t.WEAK)]


def _pays(facts: Facts) -> list[Evidence]:
    if not pays(facts):
        return []
    clearly = facts.pays_length > t.LENGTH_PAYS
    return [
        Evidence(
            sentence=f"within groups longer responses earn more (correlation {facts.pays_length:.2f})"
            + ("" if clearly else ", and the reward stays up while they grow and the evaluation falls"),
            points=t.DECISIVE if clearly else t.STRONG,
        )
    ]
