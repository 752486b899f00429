"""The order of a change and the fall."""

from __future__ import annotations

from ...dynamics.changes import ChangePoint
from ...dynamics.conditions import PROMPTS
from .. import thresholds as t
from ..evidence import Evidence
from ..facts import Facts
from ..moves import POLICY

FIRST, WITH, AFTER = "first", "with", "after"


def order(facts: Facts, change: ChangePoint) -> str:
    """Whether a change came before the fall, with it, or after it.

    Decided where the intervals do not overlap; a change before a good part was lost is not after the fall. `with` where
    nothing fell.
    """
    fall = facts.fall
    if fall is None:
        return WITH
    if change.high < fall.low:
        return FIRST
    return AFTER if change.low > max(fall.high, fall.fallen) else WITH


def rises(facts: Facts, name: str, least_sd: float = 2.0) -> list[ChangePoint]:
    """The changes of a series that went up."""
    return [change for change in facts.changes.get(name, ()) if change.size_in_sd > least_sd]


def at_once(facts: Facts, points: float) -> list[Evidence]:
    """A gradient that is another one before anything else moves, or a policy that is at one step, with its engine."""
    found = facts.moves
    gradient, sampled = found.step("grad_norm"), found.step("sampled")
    if gradient is not None and found.of["grad_norm"].size_in_sd > 0 and not found.moves_at(gradient, "reward", "mean_abs_d", *POLICY):
        return [Evidence(code="gradient_moves_first", values={"step": gradient}, points=points)]
    if sampled is None or facts.clear(PROMPTS) or found.moves_at(sampled, "mean_abs_d", "grad_norm"):
        return []
    if found.moves_at(sampled, "reward") and not found.moves_at(sampled - 1, "reward", "relation", *POLICY):
        return [Evidence(code="policy_moves_at_once", values={"step": sampled}, points=points)]
    return []


def largest_rise(facts: Facts) -> ChangePoint | None:
    """The change by which the mismatch grew most; None where it never grew twofold."""
    changes = rises(facts, "mean_abs_d", 3.0)
    largest = max(changes, key=lambda change: change.after / max(change.before, 1e-12), default=None)
    return largest if largest and largest.after > t.MISMATCH_JUMPS * max(largest.before, 1e-12) else None
