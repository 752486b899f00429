"""Facts about a run and its baseline: the first difference, and what else differs there or later."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from ...facts import thresholds as ft
from ...facts.recorded import read_recorded
from ...facts.relations import length_correlation, relation
from ...facts.rollouts import Rollouts, least_reward, repeated_responses, reward_differences, shared_responses
from ..divergence import ENGINE, SAMPLING, SCORING, UPDATE, Divergence
from ..fact import Fact, fact, of_ratio
from ..run_facts import Facts
from ..settings import suspect_of
from .engine import declared_lag, is_farther_behind, weighs

_SAME = 1e-5
"""Relative difference up to which two logged numbers are equal."""
_SHOWS = 1e-4
"""Policy change per update, in nats per token, from which a loss term shows in the gradient norm."""


def first(facts: Facts, control: Facts, parted: Divergence | None) -> Iterator[Fact]:
    if parted is None:
        return
    group = ""
    if parted.code == ENGINE:
        finding = facts.checked.findings[0] if facts.checked else None
        cause = str(finding.numbers.get("cause")) if finding is not None and finding.signal == "engine_weights" else ""
        behind = cause == "stale_weights" or is_farther_behind(facts, control)
        group = "behind" if behind else "at_once" if parted.num_before == 0 or cause else "later"
    if parted.code == SAMPLING:
        group = "few" if int(parted.values["num_equal"]) > 0.8 * int(parted.values["num_sequences"]) else ""
    level = 1.0
    if parted.code in (ENGINE, SCORING):
        apart = float(parted.values.get("apart", 0.0))
        level = 1.0 if math.isnan(apart) else max(apart / (apart + 0.005), weighs(facts))
    yield fact(parted.code, level, group, step=parted.step, **parted.values)


def update(facts: Facts, control: Facts, parted: Divergence | None) -> Iterator[Fact]:
    """How the first differing update differs: gradient, size, loss and resulting weights."""
    if parted is None or parted.code != UPDATE:
        return
    step, apart = parted.step, float(parted.values.get("apart", 0.0))
    gradient, size = (_ratio(facts, control, name, step) for name in ("grad_norm", "update_to_weight"))
    if math.isfinite(gradient):
        is_equal = abs(gradient - 1) <= _SAME
        if is_equal and apart >= _SHOWS:
            yield fact("gradient_is_equal", 1.0, step=step, factor=gradient)
        if not is_equal:
            yield fact("gradient_differs", 1.0, step=step, factor=gradient)
            yield fact("gradient_grows", of_ratio(gradient, 1.0, 10.0), step=step, factor=gradient)
        if math.isfinite(size):
            by_optimizer = max(size / max(gradient, 1.0), min(gradient, 1.0) / max(size, 1e-12))
            yield fact("update_is_other", max(of_ratio(by_optimizer, 1.1, 10.0), 0.0), step=step, factor=size)
            if is_equal and abs(size - 1) <= _SAME:
                yield fact("update_is_equal", 1.0, step=step, factor=size)
    elif math.isfinite(size):
        yield fact("update_grows", of_ratio(size, 1.0, 10.0), step=step, factor=size)
    else:
        yield fact("update_or_loss", 1.0, step=step)
    if not np.isfinite(facts.rollouts.at_step(step).advantage).any():
        yield fact("update_or_loss_without_advantages", 1.0, step=step)
    losses = np.abs(control.values("loss"))
    usual = float(np.nanmedian(losses)) if np.isfinite(losses).any() else math.nan
    higher = (facts.at("loss", step) - control.at("loss", step)) / max(usual, 1e-12)
    if math.isfinite(higher) and higher:
        code = "loss_is_higher" if higher > 0 else "loss_is_lower"
        yield fact(code, float(np.tanh(abs(higher) / 3)), step=step, factor=abs(higher))
    if math.isfinite(apart):
        yield fact("weights_jump", apart / (apart + 0.3), step=step, apart=apart)


def rewards(facts: Facts, control: Facts, parted: Divergence | None) -> Iterator[Fact]:
    """Identical responses that get different rewards in the two runs."""
    a, b = facts.rollouts, control.rollouts
    at_a, at_b = shared_responses(a, b)
    difference, differs = reward_differences(a.reward[at_a], b.reward[at_b], b.reward)
    known = np.isfinite(difference)
    if known.sum() < 10:
        return
    differs &= np.abs(difference) > least_reward(b)
    share, noise = float(differs[known].mean()), repeated_responses(b).unequal
    share = max(share - 2 * (0.0 if math.isnan(noise) else noise), 0.0)
    if share <= 0.01:
        return
    values, chosen = {"share": share, "num_responses": int(known.sum())}, known & differs
    by_length = length_correlation(difference[chosen], a.length[at_a][chosen], a.step[at_a][chosen])
    if abs(by_length) > ft.LENGTH_EXPLAINS:
        yield fact("rewards_by_length", abs(by_length), correlation=by_length, **values)
    elif facts.rewards_lie_off or _permuted(a, b):
        yield fact("rewards_permuted", math.sqrt(share), **values)
    else:
        yield fact("rewards", math.sqrt(share), **values)


def _permuted(a: Rollouts, b: Rollouts) -> bool:
    """True if the first step whose rewards differ has the baseline's rewards in another order."""
    for step in np.unique(a.step):
        one, two = a.at_step(step), b.at_step(step)
        if len(one.step) != len(two.step) or not (one.whole == two.whole).all():
            return False
        if not np.allclose(one.reward, two.reward, equal_nan=True):
            return bool(np.allclose(np.sort(one.reward), np.sort(two.reward), equal_nan=True))
    return False


def rest(facts: Facts, control: Facts, parted: Divergence | None) -> Iterator[Fact]:
    of_run, of_control = (relation(run.since_fall, "reward", "advantage").by_group for run in (facts, control))
    if of_run < of_control:
        group = "against" if of_run < -0.3 else ""
        yield fact("advantages", of_control - of_run, group, run=of_run, control=of_control)
    lags = [declared_lag(run)[0] for run in (facts, control)]
    if is_farther_behind(facts, control):
        yield fact("lag", of_ratio(lags[0] + 1, lags[1] + 1, 8.0), run=lags[0], control=lags[1])
    if facts.mismatch is not None and control.mismatch is not None:
        run, other = facts.mismatch.size, control.mismatch.size
        until = facts.steps <= (math.inf if parted is None else parted.step) + ft.AHEAD
        n = min(len(facts.steps), len(control.steps))
        early = (facts.values("mean_abs_d")[:n] > 3 * control.values("mean_abs_d")[:n])[until[:n]].any()
        level = max(of_ratio(run, other, 30.0), 0.0) * weighs(facts)
        yield fact("mismatch", level, "" if early else "later", run=run, control=other)
    rates, beside = facts.values("learning_rate"), control.values("learning_rate")
    n = min(len(rates), len(beside))
    differs = np.flatnonzero(np.abs(rates[:n] - beside[:n]) > 1e-3 * np.abs(beside[:n]))
    if len(differs):
        at = int(differs[0])
        ratios = [abs(of_ratio(float(rates[one]), float(beside[one]), 10.0)) for one in differs]
        values = {"run": float(rates[at]), "control": float(beside[at])}
        yield fact("learning_rate", max(ratios), step=int(facts.steps[at]), **values)


def given(facts: Facts, control: Facts, parted: Divergence | None) -> Iterator[Fact]:
    """Settings and prompts that differ."""
    for name in sorted(facts.settings.keys() & control.settings.keys()):
        suspect, pair = suspect_of(name), (facts.settings[name], control.settings[name])
        if suspect != "unknown" and pair[0] != pair[1]:
            yield fact("setting", 1.0, suspect, setting=name, run=pair[0], control=pair[1])
    a, b = facts.rollouts, control.rollouts
    shared = np.intersect1d(np.unique(a.step), np.unique(b.step))
    other = [int(step) for step in shared if not np.array_equal(a.prompts_of(step), b.prompts_of(step))]
    if other and other[0] != shared[0]:
        follows = any(
            not np.array_equal(a.at_step(step).whole, b.at_step(step).whole) for step in shared if step < other[0]
        )
        yield fact("prompts", 1.0, "follow" if follows else "", step=other[0], num_steps=len(other))


_OF_RUN = ("setting_changed", "reference_changed", "reference_jumps", "responses_cut", "prompts_changed")
"""Facts about a run that count as a difference if the baseline lacks the same change."""


def changed(facts: Facts, control: Facts, parted: Divergence | None, known: tuple[Fact, ...] = ()) -> Iterator[Fact]:
    """Changes near the drop that the baseline lacks; `known` are the facts of the run."""
    of_control = {(change.series, change.step) for change in read_recorded(control.database, control.pair)}
    for one in known:
        series, step = one.values.get("series"), one.values.get("step")
        if one.code in _OF_RUN and one.level > 0 and (series, step) not in of_control:
            yield fact("changed", one.level, one.feature, **{**one.values, "series": str(series or one.code)})


def _ratio(facts: Facts, control: Facts, name: str, step: int) -> float:
    of_run, of_control = (run.at(name, step) for run in (facts, control))
    return of_run / of_control if of_control else math.nan


ALL = (first, update, rewards, rest, given)
