"""The order of changes and the drop."""

from __future__ import annotations

from ...facts.changes import ChangePoint
from ..run_facts import Facts

FIRST, WITH, AFTER = "first", "with", "after"


def order(facts: Facts, change: ChangePoint) -> str:
    """Return whether a change came before the drop, with it, or after it.

    The answer is before or after only if the intervals are disjoint, and after only once a good part of the outcome was lost.
    """
    fall = facts.fall
    if fall is None:
        return WITH
    if change.high < fall.low:
        return FIRST
    return AFTER if change.low > max(fall.high, fall.fallen) else WITH


def rises(facts: Facts, name: str, least_sd: float = 2.0) -> list[ChangePoint]:
    """Return the upward changes in a series that exceed `least_sd` standard deviations."""
    return [change for change in facts.changes.get(name, ()) if change.size_in_sd > least_sd]


def largest_rise(facts: Facts) -> ChangePoint | None:
    """Return the largest growth of the mismatch, or None."""
    changes = rises(facts, "mean_abs_d", 3.0)
    return max(changes, key=lambda change: change.after / max(change.before, 1e-12), default=None)
