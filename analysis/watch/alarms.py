"""The first step at which each alarm sounds.

Shapes: n steps, those that have a value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from ..diagnosis.alarms import ALARMS, Alarm
from ..dynamics.quantities import Series
from . import rule
from .repeats import Repeats
from .watched import AlarmCondition, FirstAlarm

Array = np.ndarray

OWN = "tim-trace"
_MEASURED = "docs/collapses.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged(AlarmCondition):
    """An alarm over a run."""

    steps: Array
    """[n] int64"""
    sounds: Array
    """[n] bool"""
    values: Array | None = None
    """[n] the metric."""


def judge_alarms(series: Mapping[str, Series], repeats: Repeats) -> tuple[list[Judged], tuple[str, ...]]:
    """Hold every alarm against every step: what could be judged, and published ones that could not."""
    judged, left = [], []
    for alarm in ALARMS:
        known = _metric(alarm.metric, series)
        if known is None:
            left.append(f"{alarm.who}: {alarm.definition}")
        else:
            judged.append(_published(alarm, *known))
    return [*judged, *_own(series, repeats), *_broken(series)], tuple(dict.fromkeys(left))


def first_alarms(judged: list[Judged]) -> tuple[FirstAlarm, ...]:
    """Those that sounded, the earliest first."""
    found = [_first(each) for each in judged if each.sounds.any()]
    return tuple(sorted(found, key=lambda each: each.first_step))


def _first(each: Judged) -> FirstAlarm:
    at = np.flatnonzero(each.sounds)
    return FirstAlarm(
        who=each.who, metric=each.metric, definition=each.definition, condition=each.condition, says=each.says,
        source=each.source, first_step=int(each.steps[at[0]]),
        first_value=None if each.values is None else float(each.values[at[0]]),
        last_step=int(each.steps[at[-1]]), num_steps=len(at), still=bool(each.sounds[-1]),
    )  # fmt: skip


def _published(alarm: Alarm, steps: Array, values: Array) -> Judged:
    size = np.abs(values) if alarm.of_size else values
    return Judged(
        who=alarm.who, metric=alarm.metric, definition=alarm.definition, says=alarm.summary, source=alarm.source,
        condition=f"{'>' if alarm.above else '<'} {alarm.level:g}", steps=steps, values=values,
        sounds=size > alarm.level if alarm.above else size < alarm.level,
    )  # fmt: skip


def _metric(name: str, series: Mapping[str, Series]) -> tuple[Array, Array] | None:
    """A metric of the published alarms at the steps that know it; None where the series do not give it.

    With w = exp(d): mean w = 1 + mean_d + k3, ess = (mean w)^2 / mean w^2, and chi2_token = mean w^2 - 1.
    """
    of = {"k1": ("mean_d",), "ess_token": ("ess",), "chi2_token": ("mean_d", "k3", "ess")}.get(name, (name,))
    if any(one not in series for one in of):
        return None
    known = np.logical_and.reduce([series[one].known for one in of])
    if not known.any():
        return None
    values = [series[one].values[known] for one in of]
    if name == "k1":
        found = -values[0]
    elif name == "chi2_token":
        mean_d, k3, ess = values
        found = (1 + mean_d + k3) ** 2 / ess - 1
    else:
        found = values[0]
    return series[of[0]].steps[known], found


def _own(series: Mapping[str, Series], repeats: Repeats) -> Iterator[Judged]:
    """The four signs of this project's rule, each by itself."""
    signs = (
        (rule.gap_bends, "mean_abs_d", "mean |d|", f"> {rule.GAP:g} for {rule.TIMES} steps", "the gap can bend the run"),
        (rule.rate_jumps, "learning_rate", "the learning rate", f"> {rule.RATE:g} times what it was",
         "a spike of the learning rate"),
        (rule.norm_jumps, "grad_norm", "the gradient norm over its median of 20 steps before",
         f"> {rule.NORM:g} for {rule.TIMES} steps", "the updates leave their range"),
    )  # fmt: skip
    for sounds, name, definition, condition, says in signs:
        if (known := _metric(name, series)) is not None:
            with np.errstate(invalid="ignore"):
                flags = sounds(known[1])
            yield Judged(
                who=OWN, metric=name, definition=definition, condition=condition, says=says, source=_MEASURED,
                steps=known[0], values=known[1], sounds=flags,
            )  # fmt: skip
    steps, unequal = repeats.unequal()
    if len(steps) and "reward" in series:
        yield Judged(
            who=OWN, metric="unequal_rewards", condition=f"> {rule.UNEQUAL:g}",
            definition="share of repeated responses with another reward than before, over 20 steps",
            says="the reward is not of the response alone", source=_MEASURED, steps=steps, values=unequal,
            sounds=rule.rewards_contradict(unequal),
        )  # fmt: skip


def _broken(series: Mapping[str, Series]) -> Iterator[Judged]:
    """Gradient norms and losses that are no numbers."""
    for name in ("grad_norm", "loss"):
        if name in series:
            one = series[name]
            steps = np.union1d(one.steps[one.known], one.not_finite)
            yield Judged(
                who=OWN, metric=name, definition=f"the logged {name}", condition="is NaN or infinite",
                says="the update of this step was not a number", source=one.source, steps=steps,
                sounds=np.isin(steps, one.not_finite),
            )  # fmt: skip
