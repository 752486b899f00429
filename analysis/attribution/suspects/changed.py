"""Evidence in what was changed near a fall."""

from __future__ import annotations

from ...dynamics.recorded import RecordedChange
from ...statement import Measured
from .. import thresholds as t
from ..evidence import Evidence
from ..facts import Facts


def changed(code: str, change: RecordedChange, points: float) -> Evidence:
    """A change as evidence, with its series, step, interval and both values."""
    values: dict[str, Measured] = {"series": change.series, "step": change.step, "low": change.low, "high": change.high,
              "from_value": change.before, "to_value": change.after}  # fmt: skip
    return Evidence(code=code, values=values, points=points)


def settings(facts: Facts, suspect: str) -> list[Evidence]:
    """Settings of a suspect that were changed near the fall: the one closest to it."""
    found = facts.settings_of(suspect)
    if not found or facts.fall is None:
        return []
    step = facts.fall.step
    return [changed("setting_changed", min(found, key=lambda change: abs(change.step - step)), t.DECISIVE)]


def holds(facts: Facts, points: float) -> list[Evidence]:
    """An evaluation that holds while the reward of what was sampled falls: the policy is what it was."""
    return [Evidence(code="evaluation_holds", points=points)] if facts.is_held_out else []
