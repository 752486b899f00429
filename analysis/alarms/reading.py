"""Evaluate alert rules. Published levels apply to individual logged values, so a single step can trigger an alert."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from ...schemas.steps import ALL_STEPS
from ..facts.read_series import read_series
from ..facts.series import Series
from ..statistics.estimators import Array
from ..trace.database import Database
from ..trace.source import Pair
from .figures import (
    GAP,
    NORM,
    NOT_FINITE,
    RATE,
    TIMES,
    UNEQUAL,
    UNEQUAL_REWARDS,
    Figure,
    figure,
    gap_bends,
    norm_jumps,
    rate_jumps,
    read_token_figures,
    rewards_contradict,
)  # fmt: skip
from .repeats import Repeats

OWN = "tim-trace"
_MEASURED = "docs/evidence/alerts.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    code: str
    who: str
    """Framework or paper that published the level, or `tim-trace`."""
    metric: str
    """A per-step metric (see alarms.figures)."""
    definition: str
    level: float | None
    """Level in the metric's unit, or None if `rule` states the condition as text."""
    rule: str = ""
    above: bool = True
    """False if the alert fires below the level."""
    of_size: bool = False
    """True to compare the metric's absolute value."""
    summary: str
    """Meaning of the alert according to the source."""
    source: str
    of_mismatch: bool = True
    """False if the alert concerns rewards or the optimizer."""

    @property
    def condition(self) -> str:
        """Condition under which the alert fires, e.g. `> 0.001`."""
        return self.rule if self.level is None else f"{'>' if self.above else '<'} {self.level:g}"

    @property
    def gate(self) -> str | None:
        """Equivalent `gate` condition, e.g. `tim.k3>0.001 any step`, or None if the alert has no fixed level."""
        metric = f"|{self.metric}|" if self.of_size else self.metric
        return None if self.level is None else f"tim.{metric}{self.condition.replace(' ', '')} any step"


_PUBLISHED = (
    ("verl_prob_diff", "verl", "prob_diff_mean", 0.01,
     "training/rollout_probs_diff_mean: mean |exp(train) - exp(rollout)|", "a problem (below 0.005 is normal)",
     "verl FAQ"),
    ("verl_kl", "verl", "k1", 0.1, "|rollout_corr/kl|: mean(rollout - train)", "far off-policy",
     "verl docs, rollout correction"),
    ("verl_chi2", "verl", "chi2_token", 1.0, "rollout_corr/chi2_token: mean exp(2 d) - 1", "far off-policy",
     "verl docs, rollout correction"),
    ("verl_ess", "verl", "ess_token", 0.3, "1 / mean((w / mean w)^2) with w = exp(d), not truncated",
     "a few tokens carry most of the weight", "verl docs, rollout correction"),
    ("nemo_rl_prob_error", "NeMo-RL", "mean_exp_abs_d", 1.05, "token_mult_prob_error: mean exp(|d|)",
     "NeMo-RL logs a diagnostic plot (1.00 to 1.05 is fine)", "NeMo-RL docs, GRPO"),
    ("nemo_rl_kl", "NeMo-RL", "k3", 1e-3, "gen_kl_error: mean(exp(d) - 1 - d)", "above the acceptable range",
     "NeMo-RL docs, GRPO"),
    ("miles_kl", "Miles", "k3", 1.0, "mean(exp(d) - 1 - d), called KL in the docs",
     "a configuration error (below 1e-4 is jitter)", "Miles docs, debug"),
    ("miles_abs_d", "Miles", "mean_abs_d", 0.8, "mean |d|", "chat templates differ", "Miles docs, debug"),
    ("prime_rl_kl", "prime-rl", "k3", 0.15, "mismatch_kl: mean(exp(d) - d - 1)", "prime-rl's own CI fails",
     "prime-rl CI"),
    ("tinker_kl", "Tinker", "k3", 0.01, "KL between sampler and trainer, estimated as k3", "investigate",
     "tinker-feedback#22"),
    ("tinker_k1", "Tinker", "k1", 0.01, "|optim/kl_sample_train_v1|: mean(rollout - train)",
     "training may be unstable", "tinker-cookbook, skills/research"),
    ("liu_li_low", "Liu and Li", "k3", 1e-3, "vllm-kl: mean token k3", "above the paper's low-mismatch group",
     "richardli.xyz/rl-collapse"),
    ("liu_li_high", "Liu and Li", "k3", 2e-2, "vllm-kl: mean token k3",
     "in the paper's high-mismatch group, whose runs collapsed", "richardli.xyz/rl-collapse"),
    ("icepop_abs_d", "Ling team (IcePop)", "mean_abs_d", 0.05, "mean |d|", "an MoE run collapsed above this level",
     "Ling team, IcePop; arXiv 2510.18855"),
    ("slime_abs_d", "slime", "mean_abs_d", 0.03, "mean |d|", "the framework's CI fails (4B model)", "slime, Miles CI"),
)  # fmt: skip
"""(code, who, metric, level, definition, summary, source)"""

ALARMS = tuple(
    Alarm(
        code=code, who=who, metric=metric, definition=definition, level=level, above=metric != "ess_token",
        of_size=metric == "k1", summary=summary, source=source,
    )
    for code, who, metric, level, definition, summary, source in _PUBLISHED
)  # fmt: skip


def _own_alarm(code: str, metric: str, definition: str, rule: str, summary: str, *, of_mismatch: bool = False) -> Alarm:
    return Alarm(
        code=code, who=OWN, metric=metric, definition=definition, level=None, rule=rule, summary=summary, source=_MEASURED,
        of_mismatch=of_mismatch,
    )  # fmt: skip


SIGNS: tuple[tuple[Callable[[Array], Array], Alarm], ...] = (
    (gap_bends, _own_alarm("mismatch_large", "mean_abs_d", "mean |d|", f"> {GAP:g} for {TIMES} steps",
                           "a mismatch this large can bias the run", of_mismatch=True)),
    (rate_jumps, _own_alarm("learning_rate_spike", "learning_rate", "the learning rate",
                            f"> {RATE:g} times its earlier level", "a spike in the learning rate")),
    (norm_jumps, _own_alarm("grad_norm_spike", "grad_norm", "the gradient norm",
                            f"> {NORM:g} times its median over 20 earlier steps, for {TIMES} steps", "updates are abnormally large")),
    (rewards_contradict, _own_alarm("rewards_contradict", UNEQUAL_REWARDS,
                                    "share of repeated responses whose reward differs from last time, over 20 steps",
                                    f"> {UNEQUAL:g}", "the reward depends on more than the response")),
)  # fmt: skip
"""tim-trace's own rules, as (function, alert). The function returns [n] bool: True where the alert fires."""
LEFT_OUT = replace(
    _own_alarm("logprobs_not_finite", NOT_FINITE, "tokens in the loss with a NaN or infinite logprob in either pass", "> 0",
               "mismatch metrics exclude these tokens", of_mismatch=True),
    source="logprobs",
)  # fmt: skip
BROKEN = tuple(
    _own_alarm(f"{metric}_not_finite", metric, definition, "is NaN or infinite", summary)
    for metric, definition, summary in (
        ("reward", "over half of a step's rewards are NaN or infinite", "nothing can be learned from this step"),
        ("grad_norm", "the logged grad_norm", "this step's update was not finite"),
        ("loss", "the logged loss", "this step's update was not finite"),
    )
)
EVERY_ALARM = (*ALARMS, *(alarm for _, alarm in SIGNS), LEFT_OUT, *BROKEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmReading:
    alarm: Alarm
    own: float | None
    """The metric's value at `worst_step`, or None for rules on non-finite rewards, losses or gradient norms."""
    is_raised: bool
    worst_step: int | None
    """Step with the worst value, or None for rules on non-finite rewards, losses or gradient norms."""
    first_step: int | None = None
    """First step where the alert fires, or None if it never does."""
    first_value: float | None = None
    last_step: int | None = None
    num_steps: int = 0
    still: bool = False
    """True if the alert fires at the last step with a value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmReadings:
    judged: tuple[AlarmReading, ...] = ()
    not_judged: tuple[str, ...] = ()
    """Published rules for metrics missing from the trace."""

    @property
    def num_judged(self) -> int:
        return len(self.judged)

    @property
    def raised(self) -> tuple[AlarmReading, ...]:
        return tuple(sorted((each for each in self.judged if each.is_raised), key=lambda each: each.first_step or 0))


def judge_alarms(
    series: Mapping[str, Series], repeats: Repeats, of_tokens: Mapping[str, Figure],
    whole: Mapping[str, Series] | None = None,
) -> AlarmReadings:  # fmt: skip
    """Evaluate every alert rule.

    If `series` covers only selected steps, `whole` must cover all steps, because some rules need earlier steps.
    """
    judged, left = [], []
    for alarm in ALARMS:
        known = figure(alarm.metric, series, of_tokens)
        if known is None:
            left.append(f"{alarm.who}: {alarm.definition}")
        else:
            judged.append(judge_level(alarm, *known))
    steps = next((one.steps for one in series.values()), np.empty(0, np.int64))
    judged += [*_own(whole or series, repeats, steps), *_not_finite(series), *_left_out(of_tokens)]
    return AlarmReadings(judged=tuple(judged), not_judged=tuple(dict.fromkeys(left)))


def judge_level(alarm: Alarm, steps: np.ndarray, values: Array) -> AlarmReading:
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
        first_value = float(values[at[0]]) if len(at) else None
    found = AlarmReading(alarm=alarm, own=own, is_raised=len(at) > 0, worst_step=worst_step, first_value=first_value)
    if not len(at):
        return found
    first, last = (int(steps[place]) for place in at[[0, -1]])
    return replace(found, first_step=first, last_step=last, num_steps=len(at), still=bool(fires[-1]))


def _own(series: Mapping[str, Series], repeats: Repeats, at: np.ndarray) -> Iterator[AlarmReading]:
    unequal = {UNEQUAL_REWARDS: repeats.unequal()} if "reward" in series else {}
    for fires, alarm in SIGNS:
        if (known := figure(alarm.metric, series, unequal)) is not None:
            with np.errstate(invalid="ignore"):
                flags = fires(known[1])
            asked = np.isin(known[0], at)
            if asked.any():
                yield _reading(alarm, known[0][asked], flags[asked], known[1][asked])


def _left_out(of_tokens: Mapping[str, Figure]) -> Iterator[AlarmReading]:
    if NOT_FINITE in of_tokens and (of_tokens[NOT_FINITE][1] > 0).any():
        steps, counts = of_tokens[NOT_FINITE]
        yield _reading(LEFT_OUT, steps, counts > 0, counts)


def _not_finite(series: Mapping[str, Series]) -> Iterator[AlarmReading]:
    for alarm in BROKEN:
        if alarm.metric in series:
            one = series[alarm.metric]
            steps = np.union1d(one.steps[one.known], one.not_finite)
            yield _reading(replace(alarm, source=one.source), steps, np.isin(steps, one.not_finite))


def read_alarms(database: Database, pair: Pair, of_tokens: Mapping[str, Figure] | None = None) -> AlarmReadings:
    """Evaluate every alert rule at the selected steps. Pass `of_tokens` to reuse a `read_token_figures` result."""
    whole, repeats = database.of_steps(ALL_STEPS), Repeats()
    repeats.keep(whole, ())
    of_tokens = read_token_figures(database, pair) if of_tokens is None else of_tokens
    return judge_alarms(read_series(database, pair=pair), repeats, of_tokens, read_series(whole, pair=pair))
