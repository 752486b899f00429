"""Suspect: an entropy collapse or explosion that nothing else explains."""

from __future__ import annotations

import numpy as np

from ...advice import Advice
from ...statement import Measured
from .. import thresholds as t
from ..run_facts import Facts
from ..suspect import Evidence, Suspect
from .changed import holds, settings
from .reference import in_advantages as by_distance
from .timing import AFTER, goes_with_advantages, loss_follows, loss_moves, order, rises


def entropy(facts: Facts) -> Suspect:
    """Return the evidence for and against entropy as the cause."""
    evidence = [*_moves(facts), *_large_updates(facts)] if "entropy" in facts.series else []
    return Suspect(
        code="entropy",
        evidence=(
            *evidence,
            *in_advantages(facts),
            *_coefficient(facts),
            *(loss_follows(facts, "entropy") or loss_moves(facts, "entropy")),
            *settings(facts, "entropy"),
            *holds(facts, -t.STRONG),
            t.prior("entropy"),
        ),
        next=Advice(
            remark="rerun with the sign and size of the entropy term changed (or a higher clip bound, clip_high 0.28)"
        ),
    )


def in_advantages(facts: Facts) -> list[Evidence]:
    """Detect advantages that follow -logprob after the drop, as with an entropy bonus or penalty in the reward."""
    if by_distance(facts):
        return []
    return goes_with_advantages(facts, "surprises", "advantages_by_surprise")


def _coefficient(facts: Facts) -> list[Evidence]:
    """Detect an entropy coefficient that outweighs the advantages."""
    value = facts.settings.get("entropy_coefficient")
    if not isinstance(value, float) or value <= t.ENTROPY_WEIGHS:
        return []
    values: dict[str, Measured] = {
        "setting": "entropy_coefficient",
        "value": value,
        "customary_low": 0.0,
        "customary_high": 0.01,
    }
    return [Evidence(code="setting_unusual", values=values, points=t.STRONG)]


def _moves(facts: Facts) -> list[Evidence]:
    values = facts.values("entropy")
    known = np.isfinite(values)
    steps, values = facts.steps[known], values[known]
    if len(values) < 9 or facts.fall is None:
        return []
    width = max(len(values) // 20, 3)
    # Entropy explodes within a few steps, so only the first values count.
    first, last = float(np.median(values[:3])), float(np.median(values[-width:]))
    smooth = np.convolve(values, np.ones(width) / width, mode="valid")
    at_fall = float(smooth[min(int(np.searchsorted(steps, facts.fall.low)), len(smooth) - 1)])
    rises_with_fall = any(order(facts, change) != AFTER for change in rises(facts, "entropy"))
    known_way = _climbs(facts, steps, values) or _collapses(facts, steps, values)
    code, points = known_way or _judged(first, at_fall, last, rises_with_fall=rises_with_fall)
    return [Evidence(code=code, values={"first": first, "at_fall": at_fall, "last": last}, points=points)]


def _collapses(facts: Facts, steps: np.ndarray, values: np.ndarray) -> tuple[str, float] | None:
    """Return an evidence code and its points if entropy collapses after the onset and the policy was not certain before."""
    width = max(len(values) // 20, 3)
    first, before, last = float(np.median(values[:3])), _before(facts, steps, values), float(np.median(values[-width:]))
    is_lost = before >= t.ENTROPY_UNLEARNED * first and last < t.ENTROPY_GONE * before
    return ("entropy_collapses", t.DECISIVE) if is_lost else None


def _before(facts: Facts, steps: np.ndarray, values: np.ndarray) -> float:
    """Return the entropy just before the earliest onset, or the initial entropy if that onset is at the start of the run."""
    assert facts.fall is not None
    width = max(len(values) // 20, 3)
    begins = int(np.searchsorted(steps, facts.fall.interval[0]))
    return float(np.median(values[max(begins - 2 * width, 0) : begins] if begins >= 3 else values[:3]))


def _climbs(facts: Facts, steps: np.ndarray, values: np.ndarray) -> tuple[str, float] | None:
    """Return an evidence code and its points if entropy grows gradually from just before the drop to the end of the run."""
    assert facts.fall is not None
    width = max(len(values) // 20, 3)
    begins = int(np.searchsorted(steps, facts.fall.interval[0]))
    before = _before(facts, steps, values)
    since = values[begins:]
    if len(since) < 3 or not before > 0:
        return None
    last = float(np.median(values[-width:]))
    peak = float(np.convolve(since, np.ones(3) / 3, mode="valid").max())
    is_at_once = facts.fall.fallen - facts.fall.interval[0] < t.CLIMBS_FOR
    if last <= t.ENTROPY_CLIMBS * before or last < t.ENTROPY_STAYS * peak or last > t.MOST_ENTROPY or is_at_once:
        return None
    return "entropy_climbs", t.DECISIVE + t.WEAK


def _judged(first: float, at_fall: float, last: float, *, rises_with_fall: bool) -> tuple[str, float]:
    """Return an evidence code and its points for the entropies at the start, at the onset and at the end of the run."""
    if at_fall > t.MOST_ENTROPY:
        return "entropy_impossible", 0.0
    if at_fall > t.ENTROPY_GAINED * first:
        return "entropy_rose_before_fall", t.MEDIUM
    # A policy that learns something wrong also becomes certain: entropy caused none of 65 such collapses in six suites.
    if last < t.ENTROPY_LOST * first and at_fall > t.ENTROPY_LOST * first:
        return "entropy_lost", t.WEAK
    if last < t.ENTROPY_SHRUNK * min(first, at_fall):
        return "entropy_lost", 0.0
    if last < t.ENTROPY_LOST * first:  # the policy was already certain before, as trained policies are
        return "entropy_in_range", -t.MEDIUM
    if last > t.ENTROPY_GAINED**2 * first and rises_with_fall:
        return "entropy_explodes", t.STRONG
    if last > t.ENTROPY_GAINED * first:
        return "entropy_rises_with_fall", 0.0
    return "entropy_in_range", -t.STRONG


def _large_updates(facts: Facts) -> list[Evidence]:
    """Return evidence of large updates, which also change entropy."""
    values = facts.values("update_to_weight")
    known = values[np.isfinite(values)]
    if not len(known) or float(np.median(known[: max(len(known) // 5, 1)])) < t.LARGE_UPDATE:
        return []
    return [Evidence(code="updates_large", points=-t.WEAK)]
