from __future__ import annotations

import math
import re
from collections.abc import Iterator

import numpy as np

from ....schemas.passes import REFERENCE
from ...check.sample import MAX_READ_TOKENS
from ...facts import thresholds as ft
from ...facts.conditions import LOGGED, is_learning_rate, read_conditions
from ...facts.mismatch import read_step_mismatch
from ...facts.read_series import on_steps
from ...facts.recorded import RecordedChange
from ...trace.tokens import tokens_by_step
from ..attribution import SUSPECTS
from ..fact import Fact, fact, of_ratio
from ..run_facts import Facts
from ..settings import suspect_of

_KL = re.compile(r"(^|[^a-z])kl([^a-z]|$)(?!.*coef)", re.IGNORECASE)
_MOST_LEFT = 0.1
"""Share of the logged loss's variance that its terms may leave unexplained."""
_LEAST_LEFT = 1e-4
"""Share that counts as noise, because logged terms can be means over other batches or in another precision."""


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
    """Yield the loss term whose coefficient changes. Fits the recorded terms to the logged loss, and lets one
    coefficient change once, at the step with the smallest residual."""
    assert facts.fall is not None
    steps, names, columns_SF, loss = loss_columns(facts)
    last, fewest = int(np.searchsorted(steps, facts.fall.latest, side="right")), 3 * len(names)
    yield from changed_term(names, columns_SF, loss, steps, np.arange(fewest, min(last, len(steps) - fewest)))


def loss_columns(facts: Facts) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return steps [S], the loss's terms by name [F], their values [S, F], and the logged loss [S].

    At an importance ratio of 1, the policy term is -mean(advantage). The last column is constant.
    """
    loss, rows, database = facts.values("loss"), facts.rollouts, facts.database
    distance, weights = rows.likelihood - rows.reference, (np.ones(len(rows.step)), rows.length)
    terms = {
        "policy": [-_averages(facts, rows.advantage, of_rows) for of_rows in weights],
        "reference": [_averages(facts, distance, of_rows) for of_rows in weights],
        "entropy": [facts.values("entropy")],
    }
    if np.isfinite(distance).any() and sum(tokens_by_step(database).values()) <= MAX_READ_TOKENS:
        columns = read_step_mismatch(database, (REFERENCE, facts.pair[0]), database.sources[0].run).columns
        terms["reference"] += [on_steps(facts.steps, one).values for one in columns if one.name == "k3"]
    for name, series in read_conditions(database).items():
        if series.kind == LOGGED and _KL.search(name) and np.isin(series.steps, facts.steps).all():
            terms["reference"].append(on_steps(facts.steps, series).values)
    kept = [(name, one) for name, each in terms.items() for one in each if np.isfinite(one).mean() > 0.9]
    known = np.isfinite([loss, *(one for _, one in kept)]).all(0)
    columns_SF = np.column_stack([*(one[known] for _, one in kept), np.ones(known.sum())])
    return facts.steps[known], np.array([*(name for name, _ in kept), ""]), columns_SF, loss[known]


def changed_term(
    names: np.ndarray,
    columns_SF: np.ndarray,
    loss: np.ndarray,
    steps: np.ndarray,
    places: np.ndarray,
    code: str = "loss_term_changes",
) -> Iterator[Fact]:
    """Yield the term whose coefficient changes at one of `places` (rows)."""
    if not len(places) or not len(loss):
        return
    columns_SF = columns_SF / np.maximum(np.abs(columns_SF).max(0), 1e-30)
    loss = loss / max(np.abs(loss).max(), 1e-30)
    spread = float(np.sum((loss - loss.mean()) ** 2))
    constant = float(_unexplained(columns_SF, loss, np.zeros(len(names), bool), np.zeros(1, int))[0])
    left = {name: _unexplained(columns_SF, loss, names == name, places) for name in sorted({*names.tolist()} - {""})}
    name = min(left, key=lambda each: left[each].min(), default="")
    if name and left[name].min() < _MOST_LEFT * spread:
        floor = _LEAST_LEFT * spread
        level = 1 - math.sqrt((max(float(left[name].min()), 0.0) + floor) / (max(constant, 0.0) + floor))
        yield fact(code, level, name, term=name, step=int(steps[places[left[name].argmin()]]))


def _unexplained(columns_SF: np.ndarray, loss: np.ndarray, changing: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Return a linear fit's residual sum of squares if `changing` coefficients ([F] bool) change at each place."""
    outer = columns_SF[:, :, None] * columns_SF[:, None, changing]
    since = np.cumsum(outer[::-1], 0)[::-1][places]
    slope = np.cumsum((columns_SF[:, changing] * loss[:, None])[::-1], 0)[::-1][places]
    whole = np.broadcast_to(columns_SF.T @ columns_SF, (len(places), *[columns_SF.shape[1]] * 2))
    gram = np.concatenate(
        [np.concatenate([whole, since], 2), np.concatenate([since.transpose(0, 2, 1), since[:, changing]], 2)], 1
    )
    right = np.concatenate([np.broadcast_to(columns_SF.T @ loss, (len(places), columns_SF.shape[1])), slope], 1)
    fitted = np.linalg.pinv(gram, rcond=1e-12, hermitian=True) @ right[:, :, None]
    return np.asarray(loss @ loss - (right[:, None] @ fitted)[:, 0, 0])


ALL = (settings, rate, updates, entropy, reference, loss_terms)
