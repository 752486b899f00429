from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from ...facts import thresholds as t
from ...facts.series import shared_values
from ...facts.two_runs import values_differ
from ..divergence import ENGINE, SAMPLING, SCORING, UPDATE, Divergence
from ..fact import Fact, fact, of_ratio
from ..run_facts import Facts
from ..settings import suspect_of
from .engine import is_farther_behind, weighs

_SAME = 1e-5
"""Relative difference up to which two logged numbers count as equal."""
_SHOWS = 1e-4
"""Minimum policy change per update (nats per token) that makes a loss term visible in the gradient norm."""


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
    if parted is None or parted.code != UPDATE:
        return
    step, apart = parted.step, float(parted.values.get("apart", 0.0))
    of_control = control.at("grad_norm", step)
    gradient = facts.at("grad_norm", step) / of_control if of_control else math.nan
    if not math.isfinite(gradient):
        yield fact("update_or_loss", 1.0, step=step)
    elif abs(gradient - 1) > _SAME:
        yield fact("gradient_grows", of_ratio(gradient, 1.0, 10.0), step=step, factor=gradient)
    elif apart >= _SHOWS:
        yield fact("gradient_is_equal", 1.0, step=step, factor=gradient)


def rest(facts: Facts, control: Facts, parted: Divergence | None) -> Iterator[Fact]:
    def shared(name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        both = name in facts.series and name in control.series
        return shared_values(facts.series[name], control.series[name]) if both else (np.empty(0),) * 3

    if facts.mismatch is not None and control.mismatch is not None:
        run, other = facts.mismatch, control.mismatch
        steps, of_run, of_control = shared("mean_abs_d")
        until = steps <= (math.inf if parted is None else parted.step) + t.AHEAD
        level = max(of_ratio(run, other, 30.0), 0.0) * weighs(facts)
        early = (of_run > 3 * of_control)[until].any()
        yield fact("mismatch", level, "" if early else "later", run=run, control=other)
    steps, of_run, of_control = shared("learning_rate")
    differs = np.flatnonzero(values_differ(of_run, of_control))
    if len(differs):
        at = int(differs[0])
        ratios = [abs(of_ratio(float(of_run[one]), float(of_control[one]), 10.0)) for one in differs]
        values = {"run": float(of_run[at]), "control": float(of_control[at])}
        yield fact("learning_rate", max(ratios), step=int(steps[at]), **values)


def given(facts: Facts, control: Facts, parted: Divergence | None) -> Iterator[Fact]:
    for name in sorted(facts.settings.keys() & control.settings.keys()):
        suspect, pair = suspect_of(name), (facts.settings[name], control.settings[name])
        if suspect != "unknown" and pair[0] != pair[1]:
            yield fact("setting", 1.0, suspect, setting=name, run=pair[0], control=pair[1])


ALL = (first, update, rest, given)
