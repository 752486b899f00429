from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from ...facts import thresholds as t
from ...facts.conditions import is_learning_rate
from ...facts.recorded import RecordedChange
from ...facts.series import Fall
from ..attribution import SUSPECTS
from ..fact import Fact, fact, of_ratio
from ..run_facts import Facts
from ..settings import suspect_of


def values_of(change: RecordedChange) -> dict[str, float | int | str]:
    return {"series": change.series, "step": change.step, "low": change.low, "high": change.high, "from_value": change.before,
            "to_value": change.after}  # fmt: skip


def nearness(facts: Facts, step: int) -> float:
    assert facts.fall is not None
    early = facts.fall.interval[0] - t.AHEAD - step
    return 1.0 if early <= 0 else 0.4 + 0.6 * math.exp(-early / max(len(facts.steps) / 20, 2.0))


def settings(facts: Facts, fall: Fall) -> Iterator[Fact]:
    for suspect in SUSPECTS:
        found = facts.settings_of(suspect)
        if not found:
            continue
        nearest = min(found, key=lambda change: abs(change.step - fall.step))
        level = nearness(facts, nearest.high)
        before, after = nearest.before, nearest.after
        if is_learning_rate(nearest.series) and not isinstance(before, str) and not isinstance(after, str):
            level *= abs(of_ratio(after, before, 10.0))
        yield fact("setting_changed", level, suspect, **values_of(nearest))


def rate(facts: Facts, fall: Fall) -> Iterator[Fact]:
    values = facts.values("learning_rate")
    known = np.isfinite(values) & (values > 0)
    steps, values = facts.steps[known], values[known]
    if len(steps) < 4:
        return
    ratios = np.array([values[at] / np.median(values[:at]) for at in range(3, len(values))])
    at = int(np.argmax(ratios > 3.0)) if (ratios > 3.0).any() else int(ratios.argmax())
    first, factor = int(steps[at + 3]), float(ratios[at:].max())
    # In a linear warm-up, the learning rate is always about twice its earlier median, so only larger factors count.
    is_early = first <= max(fall.high, fall.fallen)
    spike = max(of_ratio(factor, 2.0, 10.0), 0.0) if is_early else 0.0
    # The declared learning rate is the schedule's peak, so a higher one is an error.
    given = [value for name, value in facts.settings.items() if is_learning_rate(name) and isinstance(value, float)]
    declared = max(given, default=0.0)
    peak, allowed = float(values.max()), 1.1 * declared if declared > 0 else math.inf
    if (beyond := of_ratio(peak, allowed, 10.0)) > spike:
        step = int(steps[np.argmax(values > allowed)])
        yield fact("learning_rate_beyond", beyond, "", "learning_rate_spike", factor=peak / declared, step=step)
    else:
        yield fact("learning_rate_spike", spike, factor=factor, step=first)


def updates(facts: Facts, fall: Fall) -> Iterator[Fact]:
    values = facts.values("update_to_weight")
    known = np.isfinite(values) & (values > 0)
    steps, values = facts.steps[known], values[known]
    until = values[steps <= fall.high]
    if len(until) < 5:
        return
    size = float(np.median(until))
    yield fact("update_size", of_ratio(size, 0.003, 30.0), update_to_weight=size)
    first = fall.interval[0] - t.AHEAD - 5
    before, near = values[steps < first][-20:], (steps >= first) & (steps <= fall.latest)
    if len(before) >= 5 and near.any():
        at = np.flatnonzero(near)[int(values[near].argmax())]
        factor = float(values[at] / np.median(before))
        yield fact("update_leaps", max(of_ratio(factor, 1.5, 12.0), 0.0), step=int(steps[at]), factor=factor)


def entropy(facts: Facts, fall: Fall) -> Iterator[Fact]:
    known = np.isfinite(facts.values("entropy"))
    steps, values = facts.steps[known], facts.values("entropy")[known]
    if len(values) < 9:
        return
    width = max(len(values) // 20, 3)
    begins = int(np.searchsorted(steps, fall.interval[0]))
    start, last = float(np.median(values[:3])), float(np.median(values[-width:]))
    before = float(np.median(values[max(begins - 2 * width, 0) : begins] if begins >= 3 else values[:3]))
    at = values[(steps >= fall.low) & (steps <= fall.fallen)]
    at_fall = float(np.median(at)) if len(at) else before
    numbers = {"first": start, "at_fall": at_fall, "last": last}
    if at_fall > 14.0:
        yield fact("entropy_impossible", 1.0, **numbers)
        return
    smooth = np.convolve(values[begins:], np.ones(3) / 3, mode="valid")
    stays = last / max(float(smooth.max()), 1e-9) if len(smooth) else 0.0
    grown, left = of_ratio(last, before, 8.0), before / max(start, 1e-9)
    if grown > 0:
        slow = 1.0 if fall.fallen - fall.interval[0] >= 2 else 0.3
        yield fact("entropy_climbs", grown * max(stays * 2 - 1, 0.0) * slow, **numbers)
    else:
        yield fact("entropy_collapses", -grown * min(left, 1.0), **numbers)


def reference(facts: Facts, fall: Fall) -> Iterator[Fact]:
    used = any(
        suspect_of(name) == "reference" and isinstance(value, float) and value for name, value in facts.settings.items()
    )
    steps, distance = facts.rollouts.by_step(facts.rollouts.likelihood - facts.rollouts.reference)
    if (other := facts.changed_reference) is not None:
        yield fact("reference_changed", math.sqrt(other.share), **other.values)
        return
    if len(steps) < 9:
        return
    width = max(len(facts.steps) // 10, 3)
    until = distance[steps < fall.low][-width:]
    if len(until) and used:
        before, last = float(np.median(until)), float(np.median(distance[-width:]))
        far = before / (before + 0.05) if before > 0 else 0.0
        level = far * max(1 - max(last, 0.0) / max(before, 1e-9), 0.0)
        yield fact("returns_to_reference", level, distance_before=before, distance_after=last)


ALL = (settings, rate, updates, entropy, reference)
