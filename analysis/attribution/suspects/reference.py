"""Suspect: the KL term, because of its coefficient or its reference model."""

from __future__ import annotations

import numpy as np

from ...advice import Advice
from ...facts import thresholds as ft
from ...facts.conditions import REFERENCE
from ...statement import Measured
from ...statistics.noise import robust_sd
from .. import thresholds as t
from ..run_facts import Facts
from ..settings import suspect_of
from ..suspect import Evidence, Suspect
from .changed import changed, holds, of_changed, policy_moves, settings
from .mismatch import unsampled
from .timing import at_once, goes_with_advantages, loss_follows, loss_moves

_BESIDE = 3
"""Number of steps compared on each side of a jump in the distance to the reference."""


def reference(facts: Facts) -> Suspect:
    """Return the evidence for and against the KL term as the cause."""
    return Suspect(
        code="reference",
        evidence=(
            *_moves(facts),
            *in_advantages(facts),
            *_gradient(facts),
            *(loss_follows(facts, "reference") or loss_moves(facts, "reference")),
            *settings(facts, "reference"),
            *holds(facts, -t.STRONG),
            t.prior("reference"),
        ),
        next=Advice(
            remark="rerun from the last version before the drop with a KL coefficient of 0 and everything else unchanged"
        ),
    )


def _moves(facts: Facts) -> list[Evidence]:
    """Return evidence of a replaced reference, a jump of the policy's distance to it, or the policy's return to it."""
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
    if jump := _jump(facts):
        return [jump]
    used = [
        value for name, value in facts.settings.items() if suspect_of(name) == "reference" and isinstance(value, float)
    ]
    if any(used):
        return _returns(facts)
    return [] if facts.clear(REFERENCE) else [Evidence(code="no_reference", points=-t.STRONG)]


def in_advantages(facts: Facts) -> list[Evidence]:
    """Detect advantages that follow the distance to the reference, as with a KL term in the reward."""
    if not np.isfinite(facts.rollouts.reference).any():
        return []
    return goes_with_advantages(facts, "leaves", "advantages_by_distance")


def _gradient(facts: Facts) -> list[Evidence]:
    """Detect a gradient that grows before anything else in a run with a reference, as with a larger KL coefficient."""
    if not np.isfinite(facts.rollouts.reference).any():
        return []
    return [each for each in at_once(facts, t.MEDIUM) if each.code == "gradient_moves_first"]


def _jump(facts: Facts) -> Evidence | None:
    """Detect a distance to the reference that grows several-fold in one step although the policy is unchanged."""
    steps, distance = facts.rollouts.reference_distance_by_step
    if facts.fall is None or len(steps) < 2 * _BESIDE:
        return None
    first, last = facts.fall.interval[0] - ft.AHEAD - _BESIDE, facts.fall.latest
    scatter = max(robust_sd(np.diff(distance)), 1e-12)
    best: Evidence | None = None
    largest = t.OF_NO_SCATTER * scatter
    for place in range(_BESIDE, len(steps) - _BESIDE + 1):
        before, since = distance[place - _BESIDE : place], distance[place : place + _BESIDE]
        rise = float(since.min() - before.max())
        is_multiple = float(np.median(since)) > t.DISTANCE_JUMPS * max(float(np.median(before)), 0.0)
        step = int(steps[place])
        if not first <= step <= last or rise <= largest or not is_multiple:
            continue
        if not policy_moves(facts, step) and not facts.rollouts.keeps_reference(step):
            largest = rise
            values: dict[str, Measured] = {
                "series": "reference_distance", "step": step, "low": step, "high": step,
                "from_value": float(np.median(before)), "to_value": float(np.median(since)),
            }  # fmt: skip
            best = Evidence(code="distance_jumps", values=values, points=t.DECISIVE)
    return best


def _returns(facts: Facts) -> list[Evidence]:
    """Detect a policy that returns to its reference, which only a KL term causes."""
    steps, distance = facts.rollouts.reference_distance_by_step
    is_far = facts.mismatch is not None and t.of_size(facts.mismatch.size) >= 0
    if facts.fall is None or not len(steps) or is_far:
        return []
    width = max(len(facts.steps) // 10, 3)
    until = distance[steps < facts.fall.low][-width:]
    if not len(until):
        return []
    before, last = float(np.median(until)), float(np.median(distance[-width:]))
    # The distance has no meaning for tokens that the policy did not sample.
    if before < ft.REFERENCE_MOVES or last > t.RETURNS * before or unsampled(facts):
        return []
    points = t.CERTAIN if _coefficient_grows(facts) else t.DECISIVE
    values: dict[str, Measured] = {"distance_before": before, "distance_after": last}
    return [Evidence(code="returns_to_reference", values=values, points=points)]


def _coefficient_grows(facts: Facts) -> bool:
    """Return True if the KL coefficient grew COEFFICIENT_GROWS-fold near the drop, as with a runaway controller."""
    of_term = [change for change in facts.near if change.kind != REFERENCE and suspect_of(change.series) == "reference"]
    return any(
        not isinstance(change.before, str) and not isinstance(change.after, str) and change.before > 0
        and change.after >= t.COEFFICIENT_GROWS * change.before
        for change in of_term
    )  # fmt: skip
