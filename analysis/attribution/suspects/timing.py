"""Order changes relative to the drop, and turn the first of them into evidence."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from ...facts import thresholds as ft
from ...facts.changes import ChangePoint
from ...facts.conditions import PROMPTS
from ...facts.moves import POLICY, Quantity
from ...facts.relations import correlation
from ...statement import Measured
from .. import thresholds as t
from ..run_facts import Facts
from ..suspect import Evidence

FIRST, WITH, AFTER = "first", "with", "after"
_FEWEST_BESIDE = 3
"""Minimum number of steps on each side of a drop needed to correlate advantages with another quantity."""
_FIRST = 10
"""Number of loss values compared on each side of the onset."""
_FEWEST = 8
"""Minimum number of steps needed to correlate the loss with a quantity."""


def order(facts: Facts, change: ChangePoint) -> str:
    """Return whether a change came before the drop, with it, or after it; `with` in a run without a drop.

    It is before or after only if the intervals are disjoint, and after only if a good part of the outcome was already
    lost.
    """
    fall = facts.fall
    if fall is None:
        return WITH
    if change.high < fall.low:
        return FIRST
    return AFTER if change.low > max(fall.high, fall.fallen) else WITH


def rises(facts: Facts, name: str, least_sd: float = 2.0) -> list[ChangePoint]:
    """Return the upward changes of a series by at least `least_sd` standard deviations."""
    return [change for change in facts.changes.get(name, ()) if change.size_in_sd > least_sd]


def at_once(facts: Facts, points: float) -> list[Evidence]:
    """Detect a gradient that grows before anything else, or a policy that changes within one step."""
    found = facts.moves
    gradient, sampled = found.step("grad_norm"), found.step("sampled")
    if (
        gradient is not None
        and found.size("grad_norm", gradient) > 0
        and not found.moves_at(gradient, "reward", "mean_abs_d", *POLICY)
    ):
        return [Evidence(code="gradient_moves_first", values={"step": gradient}, points=points)]
    if sampled is None or facts.clear(PROMPTS) or found.moves_at(sampled, "mean_abs_d", "grad_norm"):
        return []
    if found.moves_at(sampled, "reward") and not found.moves_at(sampled - 1, "reward", "relation", *POLICY):
        return [Evidence(code="policy_moves_at_once", values={"step": sampled}, points=points)]
    return []


def loss_moves(facts: Facts, suspect: str) -> list[Evidence]:
    """Detect a loss that leaves its range before the policy changes: down for a bonus, up for a penalty."""
    found = facts.moves
    step = found.step("loss")
    if step is None or found.moves_at(step, "reward", "mean_abs_d", *POLICY):
        return []
    is_higher = found.size("loss", step) > 0
    values: dict[str, Measured] = {"step": step, "in_sd": abs(found.size("loss", step))}
    if suspect == "entropy":
        code, points = ("loss_moves_up", -t.MEDIUM) if is_higher else ("loss_moves_down", t.STRONG)
        return [Evidence(code=code, values=values, points=points)]
    has_reference = bool(np.isfinite(facts.rollouts.reference).any())
    return [Evidence(code="loss_moves_up", values=values, points=t.MEDIUM)] if is_higher and has_reference else []


def loss_follows(facts: Facts, suspect: str) -> list[Evidence]:
    """Detect a loss that grew several-fold and, after the onset, follows entropy or the distance to the reference."""
    loss, entropy, distance = (facts.moves.columns.get(name) for name in ("loss", "entropy", "distance"))
    if facts.fall is None or loss is None:
        return []
    first = facts.fall.interval[0] - ft.AHEAD
    before, since = (
        float(loss.values[part].std()) if part.sum() >= _FEWEST else math.nan
        for part in (loss.steps < first, loss.steps >= first)
    )
    if not since > t.LOSS_GROWS * before:
        return []
    with_entropy = 0.0 if entropy is None else _together(loss, entropy, first, np.exp)
    rise = _rise(facts, loss, first)
    if suspect == "entropy" and with_entropy >= t.LOSS_PUNISHES and rise >= t.LOSS_RISES:
        return [Evidence(code="loss_punishes_entropy", values={"correlation": with_entropy}, points=t.CERTAIN)]
    with_distance = 0.0 if distance is None else _together(loss, distance, first)
    is_bonus = with_entropy <= -t.LOSS_FOLLOWS or (with_entropy <= -t.LOSS_GOES and rise <= -t.LOSS_SINKS)
    if suspect == "entropy" and is_bonus and with_entropy + with_distance < 0:
        return [Evidence(code="loss_follows_entropy", values={"correlation": with_entropy}, points=t.CERTAIN)]
    if suspect == "reference" and with_distance >= t.LOSS_FOLLOWS and with_entropy + with_distance >= 0:
        return [Evidence(code="loss_follows_distance", values={"correlation": with_distance}, points=t.CERTAIN)]
    return []


def _rise(facts: Facts, loss: Quantity, first: float) -> float:
    """Return the rise of the loss after the onset, in standard deviations; 0 if a mismatch could explain it."""
    before, since = loss.values[loss.steps < first], loss.values[loss.steps >= first]
    is_far = facts.mismatch is not None and t.of_size(facts.mismatch.size) >= 0
    rise = float(np.median(since[:_FIRST]) - np.median(before[-_FIRST:]))
    return 0.0 if is_far else rise / max(float(before.std()), 1e-12)


def _together(
    loss: Quantity, other: Quantity, first: float, scale: Callable[[np.ndarray], np.ndarray] = np.asarray
) -> float:
    """Return the correlation between the loss and another quantity, from step `first` on."""
    steps, at, of = np.intersect1d(loss.steps, other.steps, return_indices=True)
    since = steps >= first
    return correlation(loss.values[at][since], scale(other.values[of][since])) if since.sum() >= _FEWEST else 0.0


def goes_with_advantages(facts: Facts, name: str, code: str) -> list[Evidence]:
    """Detect a per-response quantity that dominates the advantages only after the drop: a term in the reward."""
    column = facts.moves.columns.get(name)
    if facts.fall is None or column is None:
        return []
    first, last = facts.fall.low, facts.moves.last + int(ft.AHEAD)
    since = (column.steps >= first) & (column.steps <= last)
    before = column.steps < facts.fall.interval[0] - ft.AHEAD
    if min(before.sum(), since.sum()) < _FEWEST_BESIDE:
        return []
    usual, now = float(np.median(column.values[before][-15:])), float(np.median(column.values[since]))
    if abs(now) < t.TERM_WEIGHS or np.sign(now) * usual > t.TERM_WEIGHS / 2:
        return []
    follows = facts.moves.columns["follows"]
    of_reward = follows.values[(follows.steps >= first) & (follows.steps <= last)]
    if len(of_reward) and abs(float(np.median(of_reward))) >= abs(now):  # inverted rewards correlate with it too
        return []
    values: dict[str, Measured] = {"correlation_before": usual, "correlation": now}
    return [Evidence(code=code, values=values, points=t.DECISIVE)]


def update_moves(facts: Facts) -> list[Evidence]:
    """Detect updates that grow before the policy changes although the gradient does not."""
    found = facts.moves
    step = found.step("update_to_weight")
    if step is None or found.size("update_to_weight", step) < 0 or found.moves_at(step, "reward", "grad_norm", *POLICY):
        return []
    return [Evidence(code="update_moves_first", values={"step": step}, points=t.DECISIVE)]


def largest_rise(facts: Facts) -> ChangePoint | None:
    """Return the largest growth of the mismatch; None if it never grew by a factor of MISMATCH_JUMPS."""
    changes = rises(facts, "mean_abs_d", 3.0)
    largest = max(changes, key=lambda change: change.after / max(change.before, 1e-12), default=None)
    return largest if largest and largest.after > t.MISMATCH_JUMPS * max(largest.before, 1e-12) else None
