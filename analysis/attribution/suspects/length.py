"""Suspect: responses grow or shrink, and what is rewarded or cut off is their length."""

from __future__ import annotations

import math

from .. import thresholds as t
from ..attribution import Suspect
from ..evidence import Evidence
from ..facts import Facts
from .timing import AFTER, order


def length(facts: Facts) -> Suspect:
    """What speaks for the length of responses."""
    pays = facts.pays_length > t.LENGTH_PAYS
    return Suspect(
        code="length",
        evidence=(
            *_moves(facts, t.LENGTH_MOVES_PAID if pays else t.LENGTH_MOVES),
            *_pays(facts.pays_length),
            t.prior("length"),
        ),
        next="rerun with a penalty for overlong responses or a larger max_tokens; look at "
        f"`tim-trace query by-length {facts.trace}`",
    )


def _moves(facts: Facts, least: float) -> list[Evidence]:
    changes = [
        change
        for change in facts.changes.get("length", [])
        if abs(math.log(max(change.after, 1e-9) / max(change.before, 1e-9))) > math.log(least)
    ]
    if not changes:
        return [Evidence(sentence="the length of responses stays what it was", points=-t.STRONG)]
    first = changes[0]
    said = f"responses go from {first.before:.3g} to {first.after:.3g} tokens from step {first.step} on"
    if order(facts, first) == AFTER:
        return [Evidence(sentence=f"{said}, after the fall began", points=-t.MEDIUM)]
    return [Evidence(sentence=f"{said}, not after the fall", points=t.WEAK)]


def _pays(correlation: float) -> list[Evidence]:
    if not correlation > t.LENGTH_PAYS:
        return []
    return [
        Evidence(
            sentence=f"within groups longer responses earn more (correlation {correlation:.2f})", points=t.DECISIVE
        )
    ]
