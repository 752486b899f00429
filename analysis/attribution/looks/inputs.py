"""Facts about prompts, limits, endings and loss masks."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from ...facts import thresholds as ft
from ...facts.conditions import PROMPTS
from ...facts.rollouts import Rollouts
from ..fact import Fact, fact, of_ratio
from ..run_facts import Facts
from .training import nearness, values_of

_MATERIAL = {"share_new_prompts": 0.2, "prompt_pattern_shift": 0.1, "prompt_form_shift": 0.02, "prompt_shift": 0.02}
"""Series -> change that weighs half, whatever its scatter was."""


def prompts(facts: Facts) -> Iterator[Fact]:
    """Yield the clearest change of the prompts near the drop, and whether several of their measures change at its step."""
    best: tuple[float, Fact] | None = None
    changes = [change for change in (*facts.near, *facts.earlier) if change.kind == PROMPTS]
    for change in changes:
        beside = [one for one in changes if abs(one.step - change.step) <= 1 and one.shape == "shift"]
        abnormal = math.hypot(*(min(abs(one.size_in_sd or 50.0), 50.0) for one in (beside or [change])))
        far = abs(float(change.after) - float(change.before))
        usual = _MATERIAL.get(change.series)
        is_new = change.series == "share_new_places" and change.before == 0
        level = nearness(facts, change) * abnormal / (abnormal + 8.0) * (1.0 if usual is None else far / (far + usual))
        level *= 0.4 if change.shape == "ramp" and not is_new else 1.0
        if best is None or level > best[0]:
            best = level, fact("prompts_changed", level, **values_of(change))
    if best is not None:
        yield best[1]


def masks(facts: Facts) -> Iterator[Fact]:
    """Yield identical responses whose loss mask changes."""
    if (found := facts.changed_masks) is not None:
        yield fact("masks_change", found.share, **found.values | {"series": "share_masked"})


def cut(facts: Facts) -> Iterator[Fact]:
    """Yield a length that responses no longer exceed and at which many end."""
    assert facts.fall is not None
    width = max(len(facts.steps) // 10, 5)
    intervals = [facts.fall.interval, *((change.low - 1, change.high) for change in facts.settings_of("truncation"))]
    found = [one for low, high in intervals for one in _cut_at(facts, low, high, high + 2 * width, width)]
    if np.isfinite(facts.values("share_length_limited")).any():
        found += list(_cut_at(facts, facts.fall.interval[0], int(facts.steps[-1]) - width, int(facts.steps[-1]), width))
    if found:
        yield max(found, key=lambda one: one.level)


def _cut_at(facts: Facts, first: int, since: int, last: int, width: int) -> Iterator[Fact]:
    before = facts.rollouts.until(first).since(first - 2 * width).num_tokens
    after = facts.rollouts.since(since + 1).until(last).num_tokens
    if not len(before) or not len(after):
        return
    limit = float(after.max())
    longer, at_it, usual = (
        float((before > limit).mean()),
        float((after == limit).mean()),
        float((before == limit).mean()),
    )
    limited = facts.values("share_length_limited")[(facts.steps > since) & (facts.steps <= last)]
    limited = limited[np.isfinite(limited)]
    group = "told" if len(limited) else "seen"
    if len(limited):
        share = min(longer, at_it, float(limited.mean()))
    else:
        share = min(longer, max(at_it - usual, 0.0)) * _kept_below(limit, before, after)
    yield fact(
        "responses_cut", min(math.sqrt(share) * 1.5, 1.0), group, limit=limit, longer_share=longer, cut_share=at_it
    )


def _kept_below(limit: float, before: np.ndarray, after: np.ndarray) -> float:
    """Return the share of responses shorter than a limit whose lengths are as before. A limit leaves them; a policy that
    has come to give responses of one length does not."""
    of_before, of_after = (
        np.bincount(lengths[lengths < limit].astype(int), minlength=int(limit)) / len(lengths)
        for lengths in (before, after)
    )
    most = max(float(of_before.sum()), float(of_after.sum()))
    return float((np.minimum(of_before, of_after).sum() + 0.05) / (most + 0.05))


def endings(facts: Facts) -> Iterator[Fact]:
    """Yield responses that begin to end, early, with tokens that rarely ended one."""
    assert facts.fall is not None
    begins = facts.fall.interval[0] - int(ft.AHEAD)
    before = facts.rollouts.until(begins - 1)
    if len(np.unique(before.step)) < 3:
        return
    steps, share = other_endings(facts.rollouts, before)
    near = np.flatnonzero((steps >= begins) & (steps <= facts.fall.latest) & (np.arange(len(steps)) <= len(steps) - 3))
    usual = float(np.median(share[steps < begins][-10:]))
    if not len(near):
        return
    rests = np.array([share[at : at + 3].min() for at in near])
    at = near[int(np.argmax(rests > 0.5 * rests.max()))] if rests.max() > 0 else near[0]
    sudden = share[at] - share[at - 1] if at else 0.0
    group = _group_of(facts, int(steps[at]))
    numbers = {"step": int(steps[at]), "share": float(rests.max()), "before_share": usual}
    code = "endings_change" if sudden > rests.max() / 2 else "endings_shift"
    yield fact(code, math.sqrt(max(rests.max() - 4 * usual, 0.0)), group, **numbers)


def one_ending(facts: Facts) -> Iterator[Fact]:
    """Yield the step from which most responses end, early, with one token that ended few before."""
    assert facts.fall is not None
    begins = facts.fall.interval[0] - int(ft.AHEAD)
    last = facts.rollouts.until(begins - 1).since(begins - 10)
    steps = np.unique(facts.rollouts.step)
    near = steps[:-2][(steps[:-2] >= begins) & (steps[:-2] <= facts.fall.latest)]
    found = [_one_ending_at(facts, int(step), last) for step in near if len(last.ending)]
    most = max((one.level for one in found), default=0.0)
    yield from [one for one in found if one.level > most / 2][:1]


def _one_ending_at(facts: Facts, step: int, before: Rollouts) -> Fact:
    now = facts.rollouts.since(step).until(step + 2)
    tokens, counts = np.unique(now.ending, return_counts=True)
    token, share = tokens[counts.argmax()], float(counts.max() / len(now.ending))
    was = float((before.ending == token).mean())
    sooner = max(of_ratio(float(before.length.mean()), float(now.length.mean()), 3.0), 0.0)
    values = {"token": int(token), "step": step, "share": share, "before_share": was}
    return fact("endings_become_one", max(share - was, 0.0) * sooner**0.5, _group_of(facts, step), **values)


def _group_of(facts: Facts, step: int) -> str:
    """Return `policy` if the gradient changed before a step, so that the policy may end its responses otherwise."""
    gradient = facts.moves.step("grad_norm")
    return "policy" if gradient is not None and gradient < step else ""


def other_endings(rollouts: Rollouts, before: Rollouts) -> tuple[np.ndarray, np.ndarray]:
    """Return n steps, and the share of responses at each that end early with a token that rarely ended a response before."""
    tokens, counts = np.unique(before.ending, return_counts=True)
    usual = tokens[counts >= 0.01 * len(before.ending)]
    is_other = ~np.isin(rollouts.ending, usual) & (rollouts.num_tokens < before.num_tokens.max())
    steps, place = np.unique(rollouts.step, return_inverse=True)
    return steps, np.bincount(place, is_other) / np.bincount(place)


ALL = (prompts, masks, cut, endings, one_ending)
