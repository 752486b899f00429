"""Suspect: the prompts are other ones than before."""

from __future__ import annotations

from ...dynamics.conditions import PROMPTS
from ...dynamics.recorded import RecordedChange
from .. import thresholds as t
from ..evidence import Evidence
from ..facts import Facts
from ..next_steps import EVALUATE_OLD_PROMPTS
from ..suspect import Suspect
from .changed import changed, holds, settings, worth


def data(facts: Facts) -> Suspect:
    """The evidence for a shift of the prompts as the cause."""
    shifted = [change for change in facts.clear(PROMPTS) if change.shape != "ramp" and _is_material(change)]
    evidence = [Evidence(code="prompts_steady", points=-t.STRONG)]
    if shifted:
        evidence = [changed("prompts_changed", shifted[0], worth(facts, shifted[0]))]
    return Suspect(
        code="data",
        evidence=(*evidence, *settings(facts, "data"), *holds(facts, t.MEDIUM), t.prior("data")),
        next=EVALUATE_OLD_PROMPTS,
    )


def _is_material(change: RecordedChange) -> bool:
    """Whether the share of new prompts moves by more than a few that happen to come first."""
    return change.series != "share_new_prompts" or abs(float(change.after) - float(change.before)) > t.NEW_PROMPTS
