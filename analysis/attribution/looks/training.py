from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from ....schemas.passes import REFERENCE
from ...facts import thresholds as ft
from ...facts.conditions import is_learning_rate
from ...facts.mismatch import read_step_mismatch
from ...facts.read_series import on_steps
from ...facts.recorded import RecordedChange
from ..attribution import SUSPECTS
from ..fact import Fact, fact, of_ratio
from ..run_facts import Facts
from ..settings import suspect_of

_MOST_LEFT = 0.1
"""Share of the logged loss's variance that its terms may leave unexplained."""


def values_of(change: RecordedChange) -> dict[str, float | int | str]:
    return {"series": change.series, "step": change.step, "low": change.low, "high": change.high, "from_value": change.before,
            "to_value": change.after}  # fmt: skip


def nearness(facts: Facts, step: int) -> float:
    assert facts.fall is not None
    early = facts.fall.interval[0] - ft.AHEAD - step
    return 1.0 if early <= 0 else 0.4 + 0.6 * math.exp(-early / max(len(facts.steps) / 20, 2.0))


def settings(facts: Facts) -> Iterator[Fact]:
    assert facts.fall is not None
    step = facts.fall.step
    for suspect in SUSPECTS:
        found = facts.settings_of(suspect)
        if not found:
            continue
        nearest = min(found, key=lambda change: abs(change.step - step))
        level = nearness(facts, nearest.high)
        before, after = nearest.before, nearest.after
        if is_learning_rate(nearest.series) and not isinstance(before, str) and not isinstance(after, str):
            level *= abs(of_ratio(after, before, 10.0))
        yield fact("setting_changed", level, suspect, **values_of(nearest))


def rate(facts: Facts) -> Iterator[Fact]:
    assert facts.fall is not None
    values = facts.values("learning_rate")
    known = np.isfinite(values) & (values > 0)
    steps, values = facts.steps[known], values[known]
    if len(steps) < 4:
        return
    ratios = np.array([values[at] / np.median(values[:at]) for at in range(3, len(values))])
    at = int(np.argmax(ratios > 3.0)) if (ratios > 3.0).any() else int(ratios.argmax())
    first, factor = int(steps[at + 3]), float(ratios[at:].max())
    if first > max(facts.fall.high, facts.fall.fallen):
        return
    # A linear warm-up alone reaches 2.
    yield fact("learning_rate_spike", max(of_ratio(factor, 2.0, 10.0), 0.0), factor=factor, step=first)


def updates(facts: Facts) -> Iterator[Fact]:
    assert facts.fall is not None
    values = facts.values("update_to_weight")
    known = np.isfinite(values) & (values > 0)
    steps, values = facts.steps[known], values[known]
    until = values[steps <= facts.fall.high]
    if len(until) < 5:
        return
    size = float(np.median(until))
    yield fact("update_size", of_ratio(size, 0.003, 30.0), update_to_weight=size)
    first = facts.fall.interval[0] - ft.AHEAD - 5
    before, near = values[steps < first][-20:], (steps >= first) & (steps <= facts.fall.latest)
    if len(before) >= 5 and near.any():
        at = np.flatnonzero(near)[int(values[near].argmax())]
        factor = float(values[at] / np.median(before))
        yield fact("update_leaps", max(of_ratio(factor, 1.5, 12.0), 0.0), step=int(steps[at]), factor=factor)


def entropy(facts: Facts) -> Iterator[Fact]:
    assert facts.fall is not None
    known = np.isfinite(facts.values("entropy"))
    steps, values = facts.steps[known], facts.values("entropy")[known]
    if len(values) < 9:
        return
    width = max(len(values) // 20, 3)
    begins = int(np.searchsorted(steps, facts.fall.interval[0]))
    start, last = float(np.median(values[:3])), float(np.median(values[-width:]))
    before = float(np.median(values[max(begins - 2 * width, 0) : begins] if begins >= 3 else values[:3]))
    at = values[(steps >= facts.fall.low) & (steps <= facts.fall.fallen)]
    at_fall = float(np.median(at)) if len(at) else before
    numbers = {"first": start, "at_fall": at_fall, "last": last}
    if at_fall > 14.0:
        yield fact("entropy_impossible", 1.0, **numbers)
        return
    smooth = np.convolve(values[begins:], np.ones(3) / 3, mode="valid")
    stays = last / max(float(smooth.max()), 1e-9) if len(smooth) else 0.0
    grown, left = of_ratio(last, before, 8.0), before / max(start, 1e-9)
    if grown > 0:
        slow = 1.0 if facts.fall.fallen - facts.fall.interval[0] >= 2 else 0.3
        yield fact("entropy_climbs", grown * max(stays * 2 - 1, 0.0) * slow, **numbers)
    else:
        yield fact("entropy_collapses", -grown * min(left, 1.0), **numbers)


def reference(facts: Facts) -> Iterator[Fact]:
    assert facts.fall is not None
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
    until = distance[steps < facts.fall.low][-width:]
    if len(until) and used:
        before, last = float(np.median(until)), float(np.median(distance[-width:]))
        far = before / (before + 0.05) if before > 0 else 0.0
        level = far * max(1 - max(last, 0.0) / max(before, 1e-9), 0.0)
        yield fact("returns_to_reference", level, distance_before=before, distance_after=last)


def _averages(facts: Facts, values_N: np.ndarray, weights_N: np.ndarray) -> np.ndarray:
    """Return the [S] weighted mean per step, NaN if unknown."""
    rows, known = facts.rollouts, np.isfinite(values_N)
    place = np.searchsorted(facts.steps, rows.step[known])
    total, weight = (
        np.bincount(place, each, len(facts.steps)) for each in (values_N[known] * weights_N[known], weights_N[known])
    )
    return np.where(weight > 0, total / np.maximum(weight, 1e-12), np.nan)


def loss_terms(facts: Facts) -> Iterator[Fact]:
    """Yield the loss term whose coefficient changes: fit the logged loss to the recorded terms, with one change of one
    term's coefficient at the step that leaves least. With the ratio 1, the policy's term is -mean(advantage)."""
    assert facts.fall is not None
    rows, ones = facts.rollouts, np.ones(len(facts.rollouts.step))
    distance = rows.likelihood - rows.reference
    terms = {
        "policy": [-_averages(facts, rows.advantage, weights) for weights in (ones, rows.length)],
        "reference": [_averages(facts, distance, weights) for weights in (ones, rows.length)],
        "entropy": [facts.values("entropy")],
    }
    if np.isfinite(distance).any():
        columns = read_step_mismatch(facts.database, (REFERENCE, facts.pair[0]), facts.database.sources[0].run).columns
        terms["reference"] += [on_steps(facts.steps, one).values for one in columns if one.name == "k3"]
    terms = {name: each for name, each in terms.items() if np.isfinite(each).all(0).mean() > 0.9}
    loss = facts.values("loss")
    known = np.isfinite([loss, *(one for each in terms.values() for one in each)]).all(0)
    steps, loss = facts.steps[known], loss[known]
    base = np.column_stack([np.ones(len(steps)), *(one[known] for each in terms.values() for one in each)])
    spread = float(np.sum((loss - loss.mean()) ** 2))
    first = np.flatnonzero(steps <= facts.fall.latest)[3 * base.shape[1] :]
    if not len(first) or len(steps) - len(first) < 3 * base.shape[1] or not spread:
        return
    constant, best = _left(base, loss), (math.inf, 0, "")
    for name, each in terms.items():
        changing = np.column_stack([one[known] for one in each])
        for at in first[: len(steps) - 2 * base.shape[1]]:
            since = changing * (np.arange(len(steps)) >= at)[:, None]
            best = min(best, (_left(np.column_stack([base, since]), loss), int(steps[at]), name))
    left, step, name = best
    if left < _MOST_LEFT * spread:
        yield fact("loss_term_changes", 1 - math.sqrt(left / constant), name, term=name, step=step)


def _left(terms: np.ndarray, loss: np.ndarray) -> float:
    residual = loss - terms @ np.linalg.lstsq(terms, loss, rcond=None)[0]
    return float(residual @ residual)


ALL = (settings, rate, updates, entropy, reference, loss_terms)
