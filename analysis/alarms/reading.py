"""Evaluate every alert rule at every step of a run.

Published levels apply to a single training step, as frameworks log the figure, so one step beyond the level makes the
alert fire.

Shapes: n steps with a value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from ..facts.read_series import read_series
from ..facts.series import Series
from ..statistics.estimators import Array
from ..trace.database import Database
from ..trace.source import Pair
from . import rule
from .figures import NOT_FINITE, UNEQUAL_REWARDS, Figure, figure, read_token_figures
from .published import ALARMS, Alarm
from .repeats import Repeats

OWN = "tim-trace"
_MEASURED = "docs/evidence/alerts.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmReading:
    """The evaluation of one alert rule over the steps of a run."""

    alarm: Alarm
    own: float | None
    """The run's value of the metric at `worst_step`; None if the rule has no single value."""
    is_raised: bool
    """True if the alert fires at any step."""
    worst_step: int | None
    """The step whose value is furthest beyond the level, or nearest to it if no value is beyond; None if no step has a
    value."""
    first_step: int | None = None
    """The first step at which the alert fires; None if it never fires."""
    first_value: float | None = None
    last_step: int | None = None
    """The last step at which the alert fires; None if it never fires."""
    num_steps: int = 0
    """Number of steps at which the alert fires."""
    still: bool = False
    """True if the alert fires at the last step with a value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmReadings:
    """The evaluations of all alert rules over a run."""

    judged: tuple[AlarmReading, ...] = ()
    not_judged: tuple[str, ...] = ()
    """Published rules that could not be evaluated because the trace lacks their metric."""

    @property
    def raised(self) -> tuple[AlarmReading, ...]:
        """Readings of the rules that fire, in the order of the first step at which they fire."""
        return tuple(sorted((each for each in self.judged if each.is_raised), key=lambda each: each.first_step or 0))


def judge_alarms(series: Mapping[str, Series], repeats: Repeats, of_tokens: Mapping[str, Figure]) -> AlarmReadings:
    """Evaluate every rule at every step: published levels, tim-trace's own rules, and checks for values that are not
    finite."""
    judged, left = [], []
    for alarm in ALARMS:
        known = figure(alarm.metric, series, of_tokens)
        if known is None:
            left.append(f"{alarm.who}: {alarm.definition}")
        else:
            judged.append(judge_level(alarm, *known))
    judged += [*_own_signs(series, repeats), *_not_finite(series), *_left_out(of_tokens)]
    return AlarmReadings(judged=tuple(judged), not_judged=tuple(dict.fromkeys(left)))


def judge_level(alarm: Alarm, steps: np.ndarray, values: Array) -> AlarmReading:
    """Evaluate a published level on the [n] values of its metric."""
    assert alarm.level is not None
    size = np.abs(values) if alarm.of_size else values
    return _reading(alarm, steps, size > alarm.level if alarm.above else size < alarm.level, values)


def _reading(alarm: Alarm, steps: np.ndarray, fires: np.ndarray, values: Array | None = None) -> AlarmReading:
    at = np.flatnonzero(fires)
    own = worst_step = first_value = None
    if values is not None:
        among = at if len(at) else np.arange(len(values))
        size = np.abs(values[among]) if alarm.of_size else values[among]
        worst = int(among[np.nanargmax(size) if alarm.above else np.nanargmin(size)])
        own, worst_step = float(values[worst]), int(steps[worst])
    if not len(at):
        return AlarmReading(alarm=alarm, own=own, is_raised=False, worst_step=worst_step)
    if values is not None:
        first_value = float(values[at[0]])
    return AlarmReading(
        alarm=alarm, own=own, is_raised=True, worst_step=worst_step, first_step=int(steps[at[0]]), first_value=first_value,
        last_step=int(steps[at[-1]]), num_steps=len(at), still=bool(fires[-1]),
    )  # fmt: skip


def _own_signs(series: Mapping[str, Series], repeats: Repeats) -> Iterator[AlarmReading]:
    """Yield the readings of tim-trace's four own rules."""
    signs = (
        (rule.gap_bends, "mean_abs_d", "mean |d|", f"> {rule.GAP:g} for {rule.TIMES} steps", "a mismatch of this size can bias the run", True),
        (rule.rate_jumps, "learning_rate", "the learning rate", f"> {rule.RATE:g} times its earlier level",
         "a spike of the learning rate", False),
        (rule.norm_jumps, "grad_norm", "the gradient norm divided by its median over the 20 steps before",
         f"> {rule.NORM:g} for {rule.TIMES} steps", "updates are abnormally large", False),
    )  # fmt: skip
    for fires, metric, definition, condition, summary, of_mismatch in signs:
        if (known := figure(metric, series, {})) is not None:
            with np.errstate(invalid="ignore"):
                flags = fires(known[1])
            alarm = Alarm(
                who=OWN, metric=metric, definition=definition, level=None, rule=condition, summary=summary,
                source=_MEASURED, of_mismatch=of_mismatch,
            )  # fmt: skip
            yield _reading(alarm, known[0], flags, known[1])
    steps, unequal = repeats.unequal()
    if len(steps) and "reward" in series:
        alarm = Alarm(
            who=OWN, metric=UNEQUAL_REWARDS, level=None, rule=f"> {rule.UNEQUAL:g}",
            definition="share of repeated responses with a different reward than before, over 20 steps",
            summary="the reward depends on more than the response", source=_MEASURED, of_mismatch=False,
        )  # fmt: skip
        yield _reading(alarm, steps, rule.rewards_contradict(unequal), unequal)


def _left_out(of_tokens: Mapping[str, Figure]) -> Iterator[AlarmReading]:
    """Yield a reading if the mismatch excludes tokens whose logprobs are not finite."""
    if NOT_FINITE in of_tokens and (of_tokens[NOT_FINITE][1] > 0).any():
        steps, counts = of_tokens[NOT_FINITE]
        alarm = Alarm(
            who=OWN, metric=NOT_FINITE, level=None, rule="> 0",
            definition="tokens in the loss with a NaN or infinite logprob in either pass",
            summary="the figures of the mismatch exclude these tokens", source="logprobs", of_mismatch=True,
        )  # fmt: skip
        yield _reading(alarm, steps, counts > 0, counts)


def _not_finite(series: Mapping[str, Series]) -> Iterator[AlarmReading]:
    """Yield readings for rewards, gradient norms and losses that are not finite."""
    series_of_run = (
        ("reward", "most rewards of a step", "nothing can be learned from this step"),
        ("grad_norm", "the logged grad_norm", "the update of this step was not a number"),
        ("loss", "the logged loss", "the update of this step was not a number"),
    )
    for name, definition, summary in series_of_run:
        if name in series:
            one = series[name]
            steps = np.union1d(one.steps[one.known], one.not_finite)
            alarm = Alarm(
                who=OWN, metric=name, definition=definition, level=None, rule="is NaN or infinite", summary=summary,
                source=one.source, of_mismatch=False,
            )  # fmt: skip
            yield _reading(alarm, steps, np.isin(steps, one.not_finite))


def read_alarms(database: Database, pair: Pair) -> AlarmReadings:
    """Evaluate every rule over all steps of the open run."""
    run = database.sources[0].run
    repeats = Repeats()
    repeats.keep(database, run, ())
    return judge_alarms(read_series(database, pair=pair), repeats, read_token_figures(database, pair, run))
