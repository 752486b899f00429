"""Suspect: advantages with the wrong sign, scale or baseline."""

from __future__ import annotations

import math

import numpy as np

from ...advice import Advice
from ...facts import thresholds as ft
from ...facts.conditions import ADVANTAGES
from ...facts.recorded import RecordedChange
from ...facts.relations import relation
from ...facts.rollouts import Rollouts
from ...statement import Measured
from .. import thresholds as t
from ..run_facts import Facts
from ..suspect import Evidence, Suspect
from .changed import changed, holds, settings, worth
from .entropy import in_advantages as by_surprise
from .reference import in_advantages as by_distance

_FEWEST_STEPS = 5
"""Minimum number of steps before a drop needed to know the usual size of advantages."""


def advantages(facts: Facts) -> Suspect:
    """Return the evidence for wrong advantages."""
    return Suspect(
        code="advantages",
        evidence=(
            *(one_sided(facts) or _inverted(facts) or _turned(facts) or _changed(facts)), *settings(facts, "advantages"), *holds(facts, -t.STRONG),
            t.prior("advantages"),
        ),
        next=Advice(
            remark="recompute the advantages of one step from sequences.reward and group_id, and compare with sequences.advantage"
        ),
    )  # fmt: skip


def one_sided(facts: Facts) -> list[Evidence]:
    """Detect advantages of both signs that are never negative after the onset: the sign or the baseline is lost."""
    if facts.fall is None:
        return []
    before, since = (part.advantage for part in (facts.rollouts.until(facts.fall.low - 1), facts.since_fall))
    if not len(before) or not len(since):
        return []
    negative, negative_since, positive_since = (float(part.mean()) for part in (before < 0, since < 0, since > 0))
    if negative < t.BOTH_SIGNS or negative_since > t.BOTH_SIGNS / 10 or positive_since < t.BOTH_SIGNS:
        return []
    if facts.since_fall.share_below_group < t.BOTH_SIGNS:  # equal rewards leave no negative advantages
        return []
    values = {"before_share": negative, "negative_share": negative_since}
    return [Evidence(code="advantages_one_sided", values=values, points=t.CERTAIN + t.WEAK)]


def _inverted(facts: Facts) -> list[Evidence]:
    """Detect advantages that decrease as rewards increase."""
    correlation = relation(facts.since_fall, "reward", "advantage").by_group
    if facts.advantages_break is not None:
        step, before, since = facts.advantages_break
        if since <= t.INVERTED_ADVANTAGES:
            values = {"step": step, "correlation_before": before, "correlation": since}
            is_of_term = by_distance(facts) or by_surprise(facts)  # a KL term or an entropy bonus in the reward
            return [Evidence(code="advantages_turn", values=values, points=0.0 if is_of_term else t.CERTAIN)]
    if math.isnan(correlation) or correlation > t.INVERTED_ADVANTAGES:
        return []
    return [Evidence(code="advantages_inverted", values={"correlation": correlation}, points=t.CERTAIN)]


def of_other_sign(facts: Facts) -> bool:
    """Return True if advantages have the expected size but do not follow rewards: some have the wrong sign."""
    since = facts.since_fall
    if facts.advantages_break is not None:
        since = facts.rollouts.since(facts.advantages_break[0])
    follows = relation(since, "reward", "advantage").by_group
    return follows < t.ADVANTAGE_AGREES and relation(since, "reward_size", "advantage_size").by_group >= t.SAME_SIZE


def _turned(facts: Facts) -> list[Evidence]:
    """Return evidence of advantages with the expected size, some of which have the wrong sign."""
    if not of_other_sign(facts):
        return []
    correlation = relation(facts.since_fall, "reward", "advantage").by_group
    return [Evidence(code="advantages_of_other_sign", values={"correlation": correlation}, points=t.CERTAIN)]


def _changed(facts: Facts) -> list[Evidence]:
    found = [change for change in facts.clear(ADVANTAGES) if _is_large(change, facts) and not _follows(change, facts)]
    if found:
        return [changed("advantages_changed", found[0], worth(facts, found[0]))]
    if not np.isfinite(facts.rollouts.advantage).any():
        return []
    return _burst(facts) or [Evidence(code="advantages_steady", points=-t.STRONG)]


def _follows(change: RecordedChange, facts: Facts) -> bool:
    """Return True if rewards or policy change at the same step, too early to be an effect of the advantages."""
    return change.shape != "ramp" and facts.moves.moves_at(change.step, "reward", "sampled", "entropy")


def moves_mean(facts: Facts) -> bool:
    """Return True if the mean advantage changed more than the rewards explain."""
    return any(change.series == "advantage_mean" and _is_large(change, facts) for change in facts.clear(ADVANTAGES))


def _burst(facts: Facts) -> list[Evidence]:
    """Detect advantages far larger than before at a step near the onset; later steps may have no rewards left."""
    if facts.fall is None:
        return []
    sizes = {
        int(step): float(np.nanmax(np.abs(part)))
        for step in np.unique(facts.rollouts.step)
        if np.isfinite(part := facts.rollouts.advantage[facts.rollouts.step == step]).any()
    }
    first = facts.fall.interval[0] - ft.AHEAD
    before = [size for step, size in sizes.items() if step < first]
    near = {step: size for step, size in sizes.items() if first <= step <= facts.fall.interval[1]}
    if len(before) < _FEWEST_STEPS or not near or not max(before):
        return []
    step = max(near, key=lambda step: near[step])
    if near[step] < t.BURST * max(before):
        return []
    values: dict[str, Measured] = {
        "series": "max_abs_advantage", "step": step, "low": step, "high": step, "from_value": max(before), "to_value": near[step],
    }  # fmt: skip
    return [Evidence(code="advantages_changed", values=values, points=t.CERTAIN)]


def _is_large(change: RecordedChange, facts: Facts) -> bool:
    """Return True if the rewards do not explain a change of the advantages."""
    before, after = float(change.before), float(change.after)
    if change.series == "advantage_scale":
        return _is_rescaled(before, after) and _sizes_differ(facts, change.step)
    if change.series == "advantage_mean":
        return _is_far(change, facts) or (change.shape == "shift" and _is_baseline(facts, change.step))
    return False


def _is_far(change: RecordedChange, facts: Facts) -> bool:
    """Return True if the mean advantage leaves the range of single advantages."""
    spread = float(np.nanstd(facts.rollouts.until(change.low).advantage))
    is_abnormal = change.size_in_sd is not None and abs(change.size_in_sd) >= t.OF_NO_SCATTER
    return (
        is_abnormal
        and not _follows_reward(facts, change.step)
        and abs(float(change.after)) > t.RESCALED * max(spread, 1e-12)
    )


def _is_rescaled(before: float, after: float) -> bool:
    return abs(math.log(max(after, 1e-12) / max(before, 1e-12))) > math.log(t.RESCALED)


def _sizes_differ(facts: Facts, step: int) -> bool:
    """Return True if the advantages changed in size; if normalised, their scale can change with rewards alone."""
    before, since = (part.advantage for part in _beside(facts, step))
    sizes = [float(np.nanstd(part)) if len(part) else math.nan for part in (before, since)]
    return all(map(math.isfinite, sizes)) and _is_rescaled(*sizes)


def _beside(facts: Facts, step: int) -> tuple[Rollouts, Rollouts]:
    """Return the sequences of the five steps before `step`, and of the five that start with it."""
    return facts.rollouts.until(step - 1).since(step - 5), facts.rollouts.since(step).until(step + 4)


def _is_baseline(facts: Facts, step: int) -> bool:
    """Return True if the mean advantage changes by more than its scatter but the reward does not."""
    before, since = _beside(facts, step)
    if not len(before.step) or not len(since.step):
        return False
    moved = float(np.nanmean(since.advantage) - np.nanmean(before.advantage))
    is_large = abs(moved) > t.MOVED_BASELINE * float(np.nanstd(before.advantage))
    return is_large and not _follows_reward(facts, step)


def _follows_reward(facts: Facts, step: int) -> bool:
    """Return True if the mean advantage changes with the reward, as with a slow baseline."""
    before, since = _beside(facts, step)
    if not len(before.step) or not len(since.step):
        return False
    moved = float(np.nanmean(since.advantage) - np.nanmean(before.advantage))
    of_reward = float(np.nanmean(since.reward) - np.nanmean(before.reward))
    scales = [float(np.nanstd(part)) for part in (before.advantage, before.reward)]
    normalised = of_reward * scales[0] / scales[1] if min(scales) > 0 else of_reward
    return min(abs(moved - of_reward), abs(moved - normalised)) < abs(moved) / 2
