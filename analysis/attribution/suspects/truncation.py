"""Suspect: responses are cut off."""

from __future__ import annotations

import numpy as np

from ...advice import Advice
from ...facts import thresholds as ft
from ...facts.rollouts import Rollouts
from ...statement import Measured
from .. import thresholds as t
from ..run_facts import Facts
from ..suspect import Evidence, Suspect
from .changed import holds, settings

_FEWEST_STEPS = 3
"""Minimum number of steps on each side of a step needed to compare how responses end."""


def truncation(facts: Facts) -> Suspect:
    """Return the evidence for and against truncated responses as the cause."""
    evidence = _cut(facts)
    if not any(each.points > 0 for each in evidence):
        evidence = _limited(facts) or _endings(facts) or _one_ending(facts) or evidence
    return Suspect(
        code="truncation",
        evidence=(
            *evidence,
            *settings(facts, "truncation"),
            *holds(facts, t.WEAK),
            t.prior("truncation"),
        ),
        next=Advice(
            remark="sample one step again from the same weights with a larger max_tokens, and compare the rewards"
        ),
    )


def _limited(facts: Facts) -> list[Evidence]:
    """Detect responses that start to end at a length limit below the longest earlier responses."""
    if facts.fall is None:
        return []
    limited, first = facts.values("share_length_limited"), facts.fall.interval[0] - int(ft.AHEAD)
    longest = facts.longest
    known = np.isfinite(limited) & np.isfinite(longest)
    before = known & (facts.steps < first)
    last = facts.fall.latest + int(ft.AHEAD)
    near = known & (facts.steps >= first) & (facts.steps <= last)
    if before.sum() < _FEWEST_STEPS or np.median(limited[before][-10:]) > t.OTHER_ENDINGS / 4:
        return []
    usual = float(np.median(longest[before][-10:]))
    is_cut = near & (limited >= t.CUT_SHARE) & (longest < t.SHORTER * usual)
    if not is_cut.any():
        return []
    at = int(is_cut.argmax())
    values: dict[str, Measured] = {
        "step": int(facts.steps[at]), "share": float(limited[at]), "limit": float(longest[at]), "longest_before": usual,
    }  # fmt: skip
    return [Evidence(code="limited_shorter", values=values, points=t.CERTAIN)]


def _one_ending(facts: Facts) -> list[Evidence]:
    """Detect responses that start to end earlier and with the same token, which has become a stop token."""
    if facts.fall is None:
        return []
    first, last = facts.fall.interval[0] - int(ft.AHEAD), facts.fall.latest
    steps = np.unique(facts.rollouts.step)
    for step in steps[(steps >= first) & (steps <= last)]:
        before = facts.rollouts.ordered(slice(*np.searchsorted(facts.rollouts.step, [step - 10, step])))
        now = facts.rollouts.at_step(int(step))
        if not len(before.step) or not len(now.step):
            continue
        tokens, counts = np.unique(now.ending, return_counts=True)
        token, share = tokens[counts.argmax()], float(counts.max() / len(now.ending))
        usual = float((before.ending == token).mean())
        is_sooner = now.length.mean() < t.SHORTER * before.length.mean()
        is_one = share >= t.ONE_ENDING and usual <= t.ONE_ENDING / 2
        if is_one and is_sooner and not facts.moves.moves_at(int(step), "grad_norm", "mean_abs_d"):
            values: dict[str, Measured] = {
                "step": int(step),
                "share": share,
                "before_share": usual,
                "token": int(token),
            }
            return [Evidence(code="endings_become_one", values=values, points=t.DECISIVE)]
    return []


def _endings(facts: Facts) -> list[Evidence]:
    """Detect responses that start to end early and with unusual tokens."""
    if facts.fall is None:
        return []
    rollouts, first = facts.rollouts, facts.fall.interval[0] - int(ft.AHEAD)
    before = rollouts.until(first - 1)
    if len(np.unique(before.step)) < _FEWEST_STEPS:
        return []
    steps, share = _other_endings(rollouts, before)
    near = np.flatnonzero((steps >= first) & (steps <= facts.fall.latest))
    usual_share = float(np.median(share[steps < first][-10:]))
    gradient = facts.moves.step("grad_norm")
    for at in near:
        rest = share[at : at + _FEWEST_STEPS]
        if usual_share <= t.OTHER_ENDINGS / 4 and rest.min() >= t.OTHER_ENDINGS:
            if gradient is not None and gradient < steps[at]:  # an update changed the policy
                return []
            values: dict[str, Measured] = {
                "step": int(steps[at]), "share": float(rest.mean()), "before_share": usual_share,
            }  # fmt: skip
            if share[at - 1] <= t.OTHER_ENDINGS / 4:
                return [Evidence(code="endings_change", values=values, points=t.DECISIVE + t.MEDIUM)]
            return [Evidence(code="endings_shift", values=values, points=t.MEDIUM)]
    return []


def ending_step(rollouts: Rollouts) -> int | None:
    """Return the first step from which responses end differently than in the first fifth of the run, or None."""
    steps = np.unique(rollouts.step)
    fifth = len(steps) // 5
    if fifth < _FEWEST_STEPS:
        return None
    steps, share = _other_endings(rollouts, rollouts.until(int(steps[fifth - 1])))
    for at in range(fifth, len(steps) - _FEWEST_STEPS + 1):
        if np.median(share[:at]) <= t.OTHER_ENDINGS / 4 and share[at : at + _FEWEST_STEPS].min() >= t.OTHER_ENDINGS:
            return int(steps[at])
    return None


def _other_endings(rollouts: Rollouts, before: Rollouts) -> tuple[np.ndarray, np.ndarray]:
    """Return the n steps, and the share of responses at each that end early with a previously rare last token."""
    tokens, counts = np.unique(before.ending, return_counts=True)
    usual = tokens[counts >= t.USUAL_ENDING * len(before.ending)]
    is_other = ~np.isin(rollouts.ending, usual) & (rollouts.num_tokens < before.num_tokens.max())
    steps, place = np.unique(rollouts.step, return_inverse=True)
    return steps, np.bincount(place, is_other) / np.bincount(place)


def _cut(facts: Facts) -> list[Evidence]:
    """Detect a new maximum length at which many responses end exactly, although earlier ones were longer."""
    if facts.fall is None:
        return []
    # A limit may also have been changed long before.
    set_at = [(change.low - 1, change.high) for change in facts.settings_of("truncation")]
    found = [evidence for interval in (facts.fall.interval, *set_at) for evidence in _cut_at(facts, *interval)]
    return [next((each for each in found if each.points > 0), found[0])] if found else []


def _cut_at(facts: Facts, first: int, last: int) -> list[Evidence]:
    """Detect responses cut at a new maximum length, by comparing those before and after an interval of steps."""
    width = max(len(facts.steps) // 10, 5)
    before = facts.rollouts.until(first).since(first - 2 * width).num_tokens
    since = facts.rollouts.since(last + 1).until(last + 2 * width).num_tokens
    if not len(before) or not len(since):
        return []
    limit = float(since.max())
    values = {
        "limit": limit,
        "longer_share": float((before > limit).mean()),
        "cut_share": float((since == limit).mean()),
    }
    limited = facts.values("share_length_limited")
    is_told = bool(np.isfinite(limited).any())
    limited = limited[(facts.steps > last) & (facts.steps <= last + 2 * width) & np.isfinite(limited)]
    is_limited = len(limited) > 0 and float(limited.mean()) >= t.CUT_SHARE
    # Cut responses pile up at the limit; naturally shorter responses spread over lengths.
    is_piled = values["cut_share"] >= float((before == limit).mean())
    is_cut = min(values["longer_share"], values["cut_share"]) >= t.CUT_SHARE
    if not is_cut and is_told and is_limited:
        return _shrinks(facts, before) or [Evidence(code="responses_not_cut", points=-t.STRONG)]
    if not is_cut or not (is_limited if is_told else is_piled):
        return [Evidence(code="responses_not_cut", points=-t.STRONG)]
    # Without finish reasons, responses of a changed policy may also share one length.
    return [Evidence(code="responses_cut", values=values, points=t.CERTAIN if is_told else t.DECISIVE)]


def _shrinks(facts: Facts, before: np.ndarray) -> list[Evidence]:
    """Detect a limit that keeps shrinking: at the end of the run, it cuts responses that used to be longer."""
    steps = facts.steps[-max(len(facts.steps) // 10, 5) :]
    end = facts.rollouts.since(int(steps[0])).num_tokens
    limited = facts.values("share_length_limited")[-len(steps) :]
    limited = limited[np.isfinite(limited)]
    if not len(end) or not len(limited) or limited.mean() < t.CUT_SHARE:
        return []
    limit = float(end.max())
    values = {
        "step": int(steps[0]),
        "limit": limit,
        "longer_share": float((before > limit).mean()),
        "cut_share": float((end == limit).mean()),
    }
    if min(values["longer_share"], values["cut_share"]) < t.CUT_SHARE:
        return []
    return [Evidence(code="responses_cut_at_end", values=values, points=t.CERTAIN)]
