"""Suspect: the engine sampled with outdated weights."""

from __future__ import annotations

import shlex

from ...advice import Advice
from ...facts import thresholds as ft
from ...facts.mismatch import FROM_START, FROM_UPDATES
from .. import thresholds as t
from ..run_facts import Facts
from ..suspect import Evidence, Suspect
from .changed import settings
from .lag import declared_lag, is_declared_fresh, is_grown_beside_lag


def staleness(facts: Facts) -> Suspect:
    """Return the evidence for and against staleness as the cause."""
    seen = _still(facts) or _earlier(facts)
    evidence = [*_declared(facts, is_seen=bool(seen)), *(seen or _measured(facts))]
    return Suspect(
        code="staleness",
        evidence=(*evidence, *settings(facts, "staleness"), t.prior("staleness")),
        next=Advice(
            f"tim-trace replay {shlex.quote(facts.trace)} --steps {facts.fall.step if facts.fall else 'all'} --weights-version V-1",
            "or rerun synchronously: one policy version per step",
        ),
    )


def _still(facts: Facts) -> list[Evidence]:
    """Detect an engine without new weights: its logprobs of prefixes stay bitwise constant, the trainer's change."""
    still = facts.still_engine
    if still is None or not still.explains or facts.mismatch is None:
        return []
    points = t.CERTAIN + t.of_size(facts.mismatch.size)
    return [Evidence(code="engine_stands_still", values=still.values, points=points)]


def _earlier(facts: Facts) -> list[Evidence]:
    """Detect an engine whose logprobs equal the trainer's of one step, one distance in steps, or several steps."""
    found = facts.earlier_weights
    if found is None or not found.explains or facts.mismatch is None or declared_lag(facts).at_fall >= 1:
        return []
    of_one = "earlier_weights_at_distance" if found.is_distance else "earlier_weights_of_step"
    code = of_one if found.is_one else "earlier_weights_of_several_steps"
    return [Evidence(code=code, values=found.values, points=t.CERTAIN + t.of_size(facts.mismatch.size))]


def _declared(facts: Facts, *, is_seen: bool) -> list[Evidence]:
    lag = declared_lag(facts)
    if is_declared_fresh(facts) and is_seen:
        return [Evidence(code="declared_fresh_and_still", points=0.0)]
    if is_declared_fresh(facts):
        return [Evidence(code="declared_fresh", points=-t.CERTAIN)]
    if lag.at_fall < 1:
        return [Evidence(code="no_declared_lag", points=0.0)]
    size = facts.mismatch.size if facts.mismatch else 0.0
    values = {"lag": lag.at_fall, "mean_abs_d": size}
    if is_grown_beside_lag(facts, lag):
        return [Evidence(code="mismatch_grows_beside_lag", values=values, points=0.0)]
    if lag.at_fall <= t.ORDINARY_LAG and not lag.grew:
        return [Evidence(code="ordinary_lag", values=values, points=min(t.of_size(size), 0.0))]
    points = t.CERTAIN if size >= t.APART else t.STRONG + t.of_size(size)
    if lag.grew:
        values |= {"lag_before": lag.usual}
        return [Evidence(code="declared_lag_grows", values=values, points=points + t.MEDIUM)]
    return [Evidence(code="declared_lag", values=values, points=points)]


def _measured(facts: Facts) -> list[Evidence]:
    run, stale, lag = facts.mismatch, facts.stale_weights, declared_lag(facts).at_fall
    if run is None:
        return []
    of_size = t.of_size(run.size)
    if is_declared_fresh(facts):
        return []
    if stale is not None and lag < 1:
        if stale.explains:
            return [Evidence(code="stale_weights_match", values=stale.values, points=t.CERTAIN + of_size)]
        if stale.is_excluded:
            values = {"max_distance": stale.farthest, "left_share": stale.left}
            return [Evidence(code="stale_weights_excluded", values=values, points=-t.STRONG)]
    if facts.still_engine is not None and facts.still_engine.still <= ft.STILL_BY_CHANCE and lag < 1:
        return [Evidence(code="engine_moves_on", values=facts.still_engine.values, points=-t.STRONG)]
    if facts.grows_from_nothing and lag < 1:
        values = {"step": facts.moves.step("mean_abs_d") or 0}
        return [Evidence(code="mismatch_grows_by_updates", values=values, points=t.STRONG + of_size)]
    if run.begins == FROM_START:
        code = "mismatch_at_first_step" if lag else "mismatch_at_first_step_without_lag"
        return [Evidence(code=code, points=-t.MEDIUM)]
    if run.begins == FROM_UPDATES and of_size >= 0 and not run.grows and lag < 1:
        causes = [finding.numbers.get("cause") for finding in facts.checked.findings] if facts.checked else []
        code = "mismatch_steady_and_check" if "stale_weights" in causes else "mismatch_steady"
        return [Evidence(code=code, points=t.STRONG + of_size)]
    return []
