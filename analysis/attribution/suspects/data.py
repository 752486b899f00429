"""Suspect: the prompts are other ones than before."""

from __future__ import annotations

from ...dynamics.conditions import PROMPTS
from .. import thresholds as t
from ..evidence import Evidence
from ..facts import Facts
from ..next_steps import EVALUATE_OLD_PROMPTS
from ..suspect import Suspect
from .changed import changed, holds, settings


def data(facts: Facts) -> Suspect:
    """The evidence for a shift of the prompts as the cause."""
    shifted = [change for change in facts.clear(PROMPTS) if change.shape != "ramp"]
    evidence = (
        [changed("prompts_changed", shifted[0], t.DECISIVE)]
        if shifted
        else [Evidence(code="prompts_steady", points=-t.STRONG)]
    )
    return Suspect(
        code="data",
        evidence=(*evidence, *settings(facts, "data"), *holds(facts, t.MEDIUM), t.prior("data")),
        next=EVALUATE_OLD_PROMPTS,
    )
