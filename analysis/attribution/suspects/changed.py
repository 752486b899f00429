"""Turn changes near a drop into evidence."""

from __future__ import annotations

import numpy as np

from ...facts import thresholds as ft
from ...facts.recorded import RecordedChange
from ...facts.relations import ChangedResponses
from ...statement import Measured
from ...statistics.noise import robust_sd
from .. import thresholds as t
from ..run_facts import Facts
from ..settings import is_learning_rate
from ..suspect import Evidence


def changed(code: str, change: RecordedChange, points: float) -> Evidence:
    """Return a change as evidence, with its series, step, interval, old and new value."""
    values: dict[str, Measured] = {"series": change.series, "step": change.step, "low": change.low, "high": change.high,
              "from_value": change.before, "to_value": change.after}  # fmt: skip
    return Evidence(code=code, values=values, points=points)


def settings(facts: Facts, suspect: str) -> list[Evidence]:
    """Return evidence from the changed setting nearest to the drop, among those that belong to a suspect."""
    found = facts.settings_of(suspect)
    if not found or facts.fall is None:
        return []
    step = facts.fall.step
    nearest = min(found, key=lambda change: abs(change.step - step))
    return [changed("setting_changed", nearest, worth(facts, nearest))]


def worth(facts: Facts, change: RecordedChange) -> float:
    """Return the points for a change of an input: CERTAIN within the onset interval, else DECISIVE or EARLIER."""
    is_given = change.size_in_sd is None or abs(change.size_in_sd) >= t.OF_NO_SCATTER
    if facts.fall is None or not is_given:
        return t.DECISIVE
    if not facts.is_near(change):
        return t.EARLIER
    if change.shape == "ramp":  # when a gradual change becomes harmful is unknown
        return t.DECISIVE
    first, last = facts.fall.interval
    if is_learning_rate(change.series) and _is_slight(change):
        return t.DECISIVE
    return t.CERTAIN if first - ft.AHEAD <= change.high and change.low <= max(last, facts.fall.fallen) else t.DECISIVE


def _is_slight(change: RecordedChange) -> bool:
    """Return True if the learning rate changes by no more than training may tolerate."""
    before, after = change.before, change.after
    if not isinstance(before, int | float) or not isinstance(after, int | float) or before * after <= 0:
        return False
    return max(before / after, after / before) < t.BEARABLE


def of_changed(found: ChangedResponses) -> float:
    """Return the points for responses whose value changed; at most DECISIVE if the change was long before the drop."""
    if found.is_earlier:
        return t.DECISIVE
    return t.CERTAIN * min(1.0, found.share / t.MUCH_UNEQUAL)


def policy_moves(facts: Facts, step: int) -> bool:
    """Return True if the policy's likelihood of its own responses changes at a step."""
    steps, mean = facts.rollouts.likelihood_by_step
    at = int(np.searchsorted(steps, step))
    before, since = mean[max(at - 3, 0) : at], mean[at : at + 3]
    if not len(before) or not len(since):
        return False
    return abs(float(since.mean() - before.mean())) > ft.SAME_POLICY * max(robust_sd(np.diff(mean)), 1e-12)


def masks(facts: Facts) -> list[Evidence]:
    """Return evidence that identical responses got a different loss mask; it counts towards `unknown`."""
    found = facts.changed_masks
    if found is None:
        return []
    return [Evidence(code="masks_change", values=found.values | {"series": "share_masked"}, points=t.CERTAIN)]


def holds(facts: Facts, points: float) -> list[Evidence]:
    """Return evidence that the evaluation stays up while the reward drops: the policy is unchanged."""
    return [Evidence(code="evaluation_holds", points=points)] if facts.is_held_out else []
