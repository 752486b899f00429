"""When a series changed, against the step at which the outcome began to fall."""

from __future__ import annotations

from ...dynamics.changes import ChangePoint
from ..facts import Facts

FIRST, WITH, AFTER = "first", "with", "after"


def order(facts: Facts, change: ChangePoint) -> str:
    """Whether a change came before the fall, with it, or after it: by intervals that lie apart."""
    fall = facts.fall
    assert fall is not None
    if change.high < fall.low:
        return FIRST
    return AFTER if change.low > fall.high else WITH


def rises(facts: Facts, name: str, least_sd: float = 2.0) -> list[ChangePoint]:
    """The changes of a series that went up."""
    return [change for change in facts.changes.get(name, []) if change.size_in_sd > least_sd]


def falls(facts: Facts, name: str, least_sd: float = 2.0) -> list[ChangePoint]:
    """The changes of a series that went down."""
    return [change for change in facts.changes.get(name, []) if change.size_in_sd < -least_sd]
