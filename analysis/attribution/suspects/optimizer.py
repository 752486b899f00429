"""Suspect: the learning rate or another optimizer setting."""

from __future__ import annotations

import numpy as np

from ...advice import Advice
from ...facts import thresholds as ft
from ...statement import Measured
from .. import thresholds as t
from ..run_facts import Facts
from ..suspect import Evidence, Suspect
from .changed import holds, settings
from .timing import AFTER, FIRST, at_once, order, rises, update_moves

_BEFORE = 5
"""Number of steps just before the onset that are left out of the earlier updates."""
_FEWEST = 5
"""Minimum number of earlier updates needed for a comparison."""
_LONG = 20
"""Number of earlier updates to compare an update with; a run also counts as having learned only after this many."""


def optimizer(facts: Facts) -> Suspect:
    """Return the evidence for and against the optimizer as the cause."""
    spike = _spike(facts)
    changed_settings = [] if any(each.points > 0 for each in spike) else settings(facts, "optimizer")
    evidence = [
        *spike, *changed_settings, *_settings(facts), *_steps(facts), *_leap(facts), *_norm(facts), *_dropped(facts), *at_once(facts, t.WEAK), *update_moves(facts), *holds(facts, -t.STRONG),
    ]  # fmt: skip
    return Suspect(
        code="optimizer",
        evidence=(*evidence, t.prior("optimizer")),
        next=Advice(
            remark="rerun from the last version before the drop with a tenth of the learning rate and everything else unchanged"
        ),
    )


def _spike(facts: Facts) -> list[Evidence]:
    values = facts.values("learning_rate")
    known = np.isfinite(values) & (values > 0)
    if known.sum() < 3 or facts.fall is None:
        return []
    steps, values = facts.steps[known], values[known]
    place = _jump(values)
    if place is None:
        return []
    first = int(steps[place])
    measured = {"factor": float(values[place:].max() / np.median(values[:place])), "step": first}
    if first > max(facts.fall.high, facts.fall.fallen):
        return [Evidence(code="learning_rate_spike_after_fall", values=measured, points=-t.WEAK)]
    if first >= facts.fall.low - max(len(facts.steps) // 10, 5):
        return [Evidence(code="learning_rate_spike_at_fall", values=measured, points=t.DECISIVE + t.MEDIUM)]
    at_fall = values[steps <= facts.fall.low][-1]
    stays = at_fall > t.RATE_STAYS * np.median(values[:place])
    return [Evidence(code="learning_rate_spike_before_fall", values=measured, points=t.DECISIVE if stays else t.MEDIUM)]


def _jump(values: np.ndarray) -> int | None:
    """Return the first index at which the learning rate exceeds RATE_SPIKE times its earlier median, or None."""
    for place in range(3, len(values)):
        if values[place] > t.RATE_SPIKE * np.median(values[:place]):
            return place
    return None


def _settings(facts: Facts) -> list[Evidence]:
    """Return evidence from settings outside their usual range; several count as one, because they are set together."""
    evidence: list[Evidence] = []
    # Without a second moment Adam is plain gradient descent, whose usual learning rates differ.
    is_adam = any(name.startswith("adam_") for name in facts.settings) and facts.settings.get("adam_beta2") != 0
    for name, (low, high, *customary) in t.CUSTOMARY.items():
        value = facts.settings.get(name)
        if name in ("learning_rate", "adam_beta2") and not is_adam:
            continue
        if isinstance(value, float) and not low <= value <= high:
            values: dict[str, Measured] = {
                "setting": name,
                "value": value,
                "customary_low": customary[0],
                "customary_high": customary[1],
            }
            evidence.append(Evidence(code="setting_unusual", values=values, points=0.0 if evidence else t.STRONG))
    return evidence


def _steps(facts: Facts) -> list[Evidence]:
    """Return evidence from the size of updates relative to the weights."""
    values = facts.values("update_to_weight")
    known = values[np.isfinite(values)]
    if not len(known) or facts.fall is None:
        return []
    end = int(np.searchsorted(facts.steps[np.isfinite(values)], facts.fall.high, side="right"))
    size = float(np.median(known[: max(end, 1)]))
    points = -t.WEAK if size < t.LARGE_UPDATE else t.MEDIUM if size < t.HUGE_UPDATE else t.STRONG
    if points > 0 and _was_borne(facts, known):
        points = t.WEAK
    return [
        Evidence(code="update_size", values={"update_to_weight": size}, points=points),
        *_bursts(known[: int(np.searchsorted(facts.steps[np.isfinite(values)], facts.fall.fallen, side="right"))]),
    ]


def _leap(facts: Facts) -> list[Evidence]:
    """Detect an update near the onset far larger than earlier ones, although clipping bounds the gradient."""
    if facts.fall is None:
        return []
    sizes, first = facts.values("update_to_weight"), facts.fall.interval[0] - int(ft.AHEAD) - _BEFORE
    before = sizes[(facts.steps < first) & np.isfinite(sizes)][-_LONG:]
    if len(before) < _FEWEST:
        return []
    usual = float(np.median(before))
    last = facts.fall.latest
    near = (facts.steps >= first) & (facts.steps <= last) & (sizes > t.LEAP * usual)
    if not near.any() or not usual > 0:
        return []
    at = int(near.argmax())
    values: dict[str, Measured] = {"step": int(facts.steps[at]), "factor": float(sizes[at]) / usual}
    return [Evidence(code="update_leaps", values=values, points=t.CERTAIN)]


def _was_borne(facts: Facts, sizes: np.ndarray) -> bool:
    """Return True if the run long tolerated equally large updates and then collapsed abruptly."""
    assert facts.fall is not None
    steps = facts.steps[np.isfinite(facts.values("update_to_weight"))]
    begin = int(np.searchsorted(steps, facts.fall.interval[0] - ft.AHEAD))
    at_fall = sizes[begin : int(np.searchsorted(steps, facts.fall.fallen, side="right"))]
    if begin < max(len(facts.steps) // 4, _LONG) or not len(at_fall) or facts.fall.kind != "collapse":
        return False
    return float(at_fall.max()) < t.AS_BEFORE * float(np.median(sizes[:begin]))


def _bursts(sizes: np.ndarray) -> list[Evidence]:
    """Detect single updates far larger than the median update."""
    if len(sizes) < 10:
        return []
    usual = float(np.median(sizes))
    num_bursts = int((sizes > t.BURST * usual).sum())
    if num_bursts < 2:
        return []
    values = {"num_updates": num_bursts, "burst_factor": t.BURST, "max_factor": float(sizes.max() / usual)}
    return [Evidence(code="update_bursts", values=values, points=t.MEDIUM)]


def _dropped(facts: Facts) -> list[Evidence]:
    """Detect a policy that changes within a few updates: they are too large, or weights were broken or reloaded."""
    drop = facts.drop
    if drop is None or not drop.is_of_policy:
        return []
    points = t.STRONG if drop.is_early else t.WEAK
    return [Evidence(code="reward_drops_with_policy", values=drop.values, points=points)]


def _norm(facts: Facts) -> list[Evidence]:
    changes = rises(facts, "grad_norm", 3.0)
    if not changes or facts.fall is None:
        return []
    first = changes[0]
    factor = first.after / max(first.before, 1e-12)
    values = {"factor": factor, "step": first.step}
    when = order(facts, first)
    if factor > t.NORM_JUMPS and when == FIRST:
        return [Evidence(code="grad_norm_grows_before_fall", values=values, points=t.WEAK)]
    if when == AFTER:
        return [Evidence(code="grad_norm_grows_after_fall", values=values, points=-t.WEAK / 2)]
    return []
