"""Suspect: the prompts changed."""

from __future__ import annotations

import math

from ...advice import Advice
from ...facts.conditions import PROMPTS
from ...facts.recorded import RecordedChange
from .. import thresholds as t
from ..run_facts import Facts
from ..suspect import Evidence, Suspect
from .changed import changed, holds, settings, worth


def data(facts: Facts) -> Suspect:
    """Return the evidence that a change of the prompts caused the drop."""
    shifted = [
        change
        for change in facts.clear(PROMPTS)
        if _is_material(change) and (change.shape != "ramp" or _is_new(change))
    ]
    evidence = [Evidence(code="prompts_steady", points=-t.STRONG)]
    shifted = shifted or _together(facts)
    if shifted:
        evidence = [changed("prompts_changed", shifted[0], worth(facts, shifted[0]))]
    return Suspect(
        code="data",
        evidence=(*evidence, *settings(facts, "data"), *holds(facts, t.MEDIUM), t.prior("data")),
        next=Advice(
            remark="evaluate the weights before and after the change on the earlier prompts: if both do equally well, the prompts are the cause"
        ),
    )


def _is_new(change: RecordedChange) -> bool:
    """Return True if prompts now have tokens at positions where no earlier prompt had them."""
    return change.series == "share_new_places" and change.before == 0


def _together(facts: Facts) -> list[RecordedChange]:
    """Return changes of several prompt statistics at one step that are significant only in combination."""
    sudden = [
        change for change in facts.near
        if change.kind == PROMPTS and change.shape == "shift" and change.high - change.low <= t.SUDDEN and _is_material(change)
    ]  # fmt: skip
    for first in sudden:
        beside = [change for change in sudden if abs(change.step - first.step) <= 1]
        if len(beside) > 1 and math.hypot(*(change.size_in_sd or 0.0 for change in beside)) >= t.TOGETHER_SD:
            return sorted(beside, key=lambda change: -abs(change.size_in_sd or 0.0))
    return []


def _is_material(change: RecordedChange) -> bool:
    """Return True if the share of new prompts or of new repetition patterns changes by more than a few prompts."""
    least = {"share_new_prompts": t.NEW_PROMPTS, "prompt_pattern_shift": t.OTHER_PATTERNS}.get(change.series)
    return least is None or abs(float(change.after) - float(change.before)) > least
