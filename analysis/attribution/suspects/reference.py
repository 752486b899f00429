"""Suspect: the KL term pulls the policy away, by its coefficient or by another reference model."""

from __future__ import annotations

from ...dynamics.conditions import REFERENCE
from .. import thresholds as t
from ..evidence import Evidence
from ..facts import Facts
from ..next_steps import WITHOUT_KL_TERM
from ..settings import suspect_of
from ..suspect import Suspect
from .changed import changed, holds, of_changed, policy_moves, settings


def reference(facts: Facts) -> Suspect:
    """The evidence for the KL term as the cause."""
    return Suspect(
        code="reference",
        evidence=(*_moves(facts), *settings(facts, "reference"), *holds(facts, -t.STRONG), t.prior("reference")),
        next=WITHOUT_KL_TERM,
    )


def _moves(facts: Facts) -> list[Evidence]:
    """A reference model that scores the same responses otherwise, or a distance to it that jumps, as no training makes it."""
    other = facts.changed_reference
    if other is not None:
        return [Evidence(code="reference_changed", values=other.values, points=of_changed(other))]
    sudden = [
        change for change in facts.clear(REFERENCE)
        if change.shape == "shift" and change.high - change.low <= t.SUDDEN and float(change.after) > float(change.before)
        and not policy_moves(facts, change.step)
    ]  # fmt: skip
    if sudden:
        return [changed("reference_jumps", sudden[0], t.DECISIVE)]
    used = [
        value for name, value in facts.settings.items() if suspect_of(name) == "reference" and isinstance(value, float)
    ]
    if any(used) or facts.clear(REFERENCE):
        return []
    return [Evidence(code="no_reference", points=-t.MEDIUM)]
