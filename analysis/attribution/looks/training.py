from __future__ import annotations

import math
import re
from collections.abc import Iterator
from itertools import product

import numpy as np

from ...facts import thresholds as ft
from ...facts.conditions import LOGGED, is_coefficient, is_learning_rate, read_conditions
from ...facts.read_series import read_series
from ...facts.recorded import RecordedChange
from ...facts.rollouts import read_rollouts
from ...trace.database import Database, cached
from ...trace.macros import quoted
from ...trace.source import Pair
from ..attribution import SUSPECTS
from ..fact import Fact, fact, of_ratio
from ..run_facts import Facts
from ..settings import suspect_of

_KL = re.compile(r"(^|[^a-z])kl([^a-z]|$)(?!.*coef)", re.IGNORECASE)
_MOST_LEFT = 0.1
"""If the terms leave more than this share of the logged loss's variance unexplained, no change is reported."""
_FEWEST_DIFFERENCES = 5
_LEAST_LEFT, _LEAST_BESIDE = 0.01, 1e-4
"""Unexplained shares that are ignored, because a logged term may cover other tokens or be computed after updates. The
second is for comparing a changed coefficient with an added constant."""


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
    # In a linear warm-up, the learning rate is always about twice its earlier median, so only larger factors count.
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
    yield from _unrelated_since(facts)
    if len(steps) < 9:
        return
    width = max(len(facts.steps) // 10, 3)
    until = distance[steps < facts.fall.low][-width:]
    if len(until) and used:
        before, last = float(np.median(until)), float(np.median(distance[-width:]))
        far = before / (before + 0.05) if before > 0 else 0.0
        level = far * max(1 - max(last, 0.0) / max(before, 1e-9), 0.0)
        yield fact("returns_to_reference", level, distance_before=before, distance_after=last)


_UNRELATED = """
SELECT step, corr(logprob_a, logprob_b) AS related, avg(logprob_a) AS scored, avg(logprob_b) AS reference
FROM pair({trained}, 'reference') WHERE mask AND isfinite(logprob_a) AND isfinite(logprob_b) GROUP BY step ORDER BY step
"""
_NEAR_STEPS = 4


def _unrelated_since(facts: Facts) -> Iterator[Fact]:
    """Report whether the reference logprobs suddenly stop correlating with the trainer's, which hardly change.

    A policy moves away from its reference gradually. A reference that is replaced or misaligned differs within one step.
    """
    assert facts.fall is not None
    if not np.isfinite(facts.rollouts.reference).any():
        return
    rows = np.array(facts.database.ask(_UNRELATED.format(trained=quoted(facts.pair[0]))).rows, float)
    steps, related, scored, reference = rows[np.isfinite(rows).all(1)].T if len(rows) else np.empty((4, 0))
    found = []
    for at in range(_NEAR_STEPS, len(steps) - _NEAR_STEPS):
        before, since = slice(at - _NEAR_STEPS, at), slice(at, at + _NEAR_STEPS)
        moved, own = (abs(float(values[since].mean() - values[before].mean())) for values in (reference, scored))
        errors = math.hypot(
            float(related[before].std(ddof=1)), float(related[since].std(ddof=1))
        )  # of 4 steps, doubled
        lost = float(related[before].mean() - related[since].mean()) - errors
        values = {
            "step": int(steps[at]),
            "before_correlation": float(related[before].mean()),
            "correlation": float(related[since].mean()),
        }
        found.append(fact("reference_unrelated", max(lost, 0.0) * moved / (moved + 2 * own + 0.1), **values))
    if found:
        yield max(found, key=lambda one: one.level)


def loss_terms(facts: Facts) -> Iterator[Fact]:
    """Yield the loss term whose coefficient changes.

    The logged loss is fitted as a weighted sum of the recorded terms, in which the coefficient of one term may change
    once. The term and the step that give the best fit are reported.
    """
    assert facts.fall is not None
    steps, names, columns_SF, loss = read_loss_terms(facts.database, facts.pair)
    last, fewest = int(np.searchsorted(steps, facts.fall.latest, side="right")), 3 * len(names)
    yield from changed_term(names, columns_SF, loss, steps, np.arange(fewest, min(last, len(steps) - fewest)))


@cached
def read_loss_terms(database: Database, pair: Pair) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return steps [S], the names [F] and values [S, F] of the loss terms, and the logged loss [S].

    The policy's term is -mean(advantage), which assumes an importance ratio of 1. The last column is constant.
    """
    series, conditions, rows = (
        read_series(database, pair=pair),
        read_conditions(database),
        read_rollouts(database, pair),
    )
    if "loss" not in series:
        return np.empty(0, np.int64), np.array([""]), np.empty((0, 1)), np.empty(0)
    distance = rows.likelihood - rows.reference
    terms = [("entropy", series["entropy"].steps, series["entropy"].values)] if "entropy" in series else []
    for weights in (None, rows.length):
        steps, mean = rows.by_step(rows.advantage, weights)
        terms += [("policy", steps, -mean), ("reference", *rows.by_step(distance, weights))]
    terms += [
        ("reference", one.steps, one.values)
        for name, one in conditions.items()
        if name == "reference_k3" or (one.kind == LOGGED and _KL.search(name))
    ]
    steps, loss = series["loss"].steps, series["loss"].values
    kept, known = [], np.isfinite(loss)
    for name, at, values in terms:
        there, aligned = np.isin(at, steps), np.full(len(steps), np.nan)
        aligned[np.searchsorted(steps, at[there])] = values[there]
        if np.isfinite(aligned).mean() > 0.9:
            kept.append((name, aligned))
            known &= np.isfinite(aligned)
    columns_SF = np.column_stack([*(values[known] for _, values in kept), np.ones(known.sum())])
    return steps[known], np.array([*(name for name, _ in kept), ""]), columns_SF, loss[known]


def changed_term(
    names: np.ndarray, columns_SF: np.ndarray, loss: np.ndarray, steps: np.ndarray, places: np.ndarray,
    code: str = "loss_term_changes",
) -> Iterator[Fact]:  # fmt: skip
    """Yield the loss term whose coefficient changes during the run. `places` holds the row indices to consider."""
    if not len(places) or len(names) < 2:
        return
    columns_SF = columns_SF / np.maximum(np.abs(columns_SF).max(0), 1e-30)
    loss = loss / max(np.abs(loss).max(), 1e-30)
    basis_SK, sizes_K, _ = np.linalg.svd(columns_SF, full_matrices=False)
    basis_SK = basis_SK[:, sizes_K > 1e-6 * sizes_K[0]]
    rest = loss - basis_SK @ (basis_SK.T @ loss)

    def since(values: np.ndarray) -> np.ndarray:
        """Return, for each of `places`, the sum of `values` from that row to the last."""
        return np.asarray(np.cumsum(values[::-1], 0)[::-1][places])

    spread, constant, left_FP = float(np.sum((loss - loss.mean()) ** 2)), float(rest @ rest), []
    for column in columns_SF.T:
        total = since(column**2)
        new = total - np.sum(since(basis_SK * column[:, None]) ** 2, 1)  # the part constant coefficients cannot fit
        gain = np.divide(since(column * rest) ** 2, new, out=np.zeros(len(places)), where=new > 1e-9 * total)
        left_FP.append(np.maximum(constant - gain, 0.0))
    term, at = np.unravel_index(np.argmin(left_FP[:-1]), np.shape(left_FP[:-1]))
    left, shifted, name = float(left_FP[term][at]), float(np.min(left_FP[-1])), str(names[term])
    if left < _MOST_LEFT * spread:
        # The change is weak evidence if the loss can be fitted nearly as well without it, or with a change in the
        # constant instead.
        others = (_LEAST_LEFT, constant), (_LEAST_BESIDE, max(shifted, left))
        level = math.prod(1 - math.sqrt((left + least * spread) / (other + least * spread)) for least, other in others)
        yield fact(code, level, name, term=name, step=int(steps[places[at]]))


_SIGNS = {"reference": 1.0, "entropy": -1.0}
"""Terms of a minimised loss -> sign of their coefficient."""
_MOST_LEFT_OF_STEPS = 0.5
"""If the terms leave more than this share of the variance of the loss's step-to-step differences unexplained, their
coefficients are not judged."""
_LEAST_ERRORS = 4.0
"""A coefficient counts only if it is larger than this many standard errors."""


def coefficients(facts: Facts) -> Iterator[Fact]:
    """Yield loss terms whose coefficient has the wrong sign, or is much larger than declared.

    The coefficients are fitted to differences between successive steps, so that common trends do not count.
    """
    assert facts.fall is not None
    steps, names, columns_SF, loss = read_loss_terms(facts.database, facts.pair)
    since = steps >= facts.fall.interval[0] - ft.AHEAD
    change = np.diff(loss[since])
    if len(change) < 2 * _FEWEST_DIFFERENCES or not change.any():
        return
    scale, changes_SF = float(np.abs(change).max()), np.diff(columns_SF[since], axis=0)
    varies = np.count_nonzero(changes_SF, axis=0) >= _FEWEST_DIFFERENCES
    choices = [(None, *np.flatnonzero(varies & (names == term))) for term in ("policy", *_SIGNS)]
    fits = [
        _fitted(changes_SF, change / scale, [at for at in chosen if at is not None]) for chosen in product(*choices)
    ]
    left, found = min(fits, key=lambda fit: fit[0])
    for at, slope, errors in found:
        term = str(names[at])
        if term == "policy":
            continue
        level = math.sqrt(max(1 - left / _MOST_LEFT_OF_STEPS, 0.0)) * max(1 - _LEAST_ERRORS / max(errors, 1e-9), 0.0)
        if slope * _SIGNS[term] < 0:
            yield fact("loss_term_inverted", level, term, term=term, coefficient=slope * scale)
        elif declared := [
            abs(value) for name, value in facts.settings.items() if _is_coefficient_of(term, name, value)
        ]:
            size = of_ratio(abs(slope * scale), 3 * max(*declared, 1e-6), 10.0)
            values = {"coefficient": slope * scale, "declared": max(declared)}
            yield fact("loss_term_oversized", level * max(size, 0.0), term, term=term, **values)


def _fitted(
    columns_SF: np.ndarray, values: np.ndarray, chosen: list[int]
) -> tuple[float, list[tuple[int, float, float]]]:
    """Fit `values` [S] as a weighted sum of the chosen columns.

    Return the unexplained share of the variance, adjusted for the number of columns, and for each column its index, its
    coefficient, and the coefficient's size in standard errors.
    """
    free = len(values) - len(chosen)
    if not chosen or free < _FEWEST_DIFFERENCES:
        return 1.0, []
    scales = np.abs(columns_SF[:, chosen]).max(0)
    columns = columns_SF[:, chosen] / scales
    q, r = np.linalg.qr(columns)
    if np.abs(np.diag(r)).min() < 1e-6:
        return 1.0, []
    inverse = np.linalg.inv(r)
    slopes = inverse @ (q.T @ values)
    variance = float(np.sum((values - columns @ slopes) ** 2)) / free
    errors = np.sqrt(np.maximum(variance * np.sum(inverse**2, 1), 1e-300))
    left = variance * len(values) / float(values @ values)
    return left, list(zip(chosen, (slopes / scales).tolist(), (np.abs(slopes) / errors).tolist(), strict=True))


def _is_coefficient_of(term: str, setting: str, value: object) -> bool:
    is_coefficient_name = is_coefficient(setting) or setting.endswith("beta")
    return is_coefficient_name and suspect_of(setting) == term and isinstance(value, float)


ALL = (settings, rate, updates, entropy, reference, loss_terms, coefficients)
