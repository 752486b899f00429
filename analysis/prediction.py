"""Predict the mismatch that a remedy would leave at steps that are not replayed.

A remedy replaces the trainer's arm, the engine's or both. At the replayed steps, the ratio of each statistic with and
without the remedy is measured. The prediction is this ratio times the recorded statistic at the other steps. From 8
replayed steps, the interval is a bootstrap over steps. With fewer, it is a bootstrap over groups, widened by the scatter
between steps: each step's weights are rounded anew, with and without the remedy, so the ratio's logarithm is assumed to
vary between steps with twice the variance of the recorded statistic between neighbouring steps.

Shapes: N sequences, G groups, S steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, hypot, inf, log, sqrt
from typing import Any

import numpy as np

from ..replay.arms import VLLM, Arm, arm_text, parse_arm
from ..replay.engine import replay
from ..replay.recorded import RecordedRun
from ..replay.results import ReplayedSteps
from ..schemas.errors import CannotReplay, InvalidOption, NotInstalled, WeightsMissing, option
from ..schemas.passes import REPLAY_PREFIX, ROLLOUT, TRAIN
from ..tracer.progress import Progress
from ..tracer.store import first_line
from .gate.condition import SequenceColumns
from .objective.figures import FIGURES, totals_of
from .objective.pass_roles import ADVANTAGE, PassRoles, choose_loss, choose_sides
from .objective.sums import read_sequence_sums
from .statistics.estimators import FROM_SUMS, Array, Totals
from .statistics.intervals import MIN_GROUPS, NoInterval, bootstrap
from .trace.database import Database
from .trace.source import Pair
from .views import open_database

MOST_WIDTH = 0.4
"""A prediction is reported only if its interval is at most this wide, relative to the predicted value."""
SAME = 1.25
"""An engine's replay stands for the recorded engine if the mean |d| that it leaves is the recorded one, up to this factor."""
ESS, BIAS = "ess_token", "relative_abs_bias"
SIZES: Mapping[str, Callable[[Totals], Array]] = {
    "mean_abs_d": FROM_SUMS["mean_abs_d"],
    "k3": FROM_SUMS["k3"],
    "share_outside": FROM_SUMS["share_outside"],
    ESS: lambda t: (
        (t["growth2"] - t["growth"] ** 2 / t["num_tokens"]) / (t["num_tokens"] + 2 * t["growth"] + t["growth2"])
    ),
    BIAS: FIGURES[BIAS].value,
}
"""Statistics that are 0 without a mismatch. For ESS, this is 1 - ESS = n var(w) / sum w^2 with w = exp(d), from growth = sum
(w - 1) and growth2 = sum (w - 1)^2."""
UNFELT = {
    "mean_abs_d": (0.0165, "IsoExec, vllm.ai 2026-08-21"),
    "k3": (1e-5, "Miles and SGLang, All-in-One"),
}
"""Mismatch in published pairs of runs whose reward was no better without it. IsoExec: 50 steps of a 35B-A3B mixture. Miles:
dense models, k3 from 1e-5 to 1e-3, of which the lower end is used here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A statistic of the mismatch, predicted for the steps that were not replayed."""

    remedy: str
    metric: str
    """mean_abs_d (nats), k3 (nats), share_outside (of the ratios, 0.8 to 1.25), ess_token, or relative_abs_bias (sum |b| /
    sum |f(rho*)| of the objective at the step's first update)."""
    recorded: float | None
    """At the steps that were not replayed, or None if unknown."""
    value: float | None
    low: float | None
    """Lower end of the 95% interval."""
    high: float | None
    code: str | None
    """Why the prediction cannot be relied on, or None if it can."""
    detail: str
    """The error, number or option that belongs to the code."""
    below: str | None
    """Published pair of runs that had a larger mismatch on one side, and no better reward without it."""


def replay_missing(
    run: RecordedRun, arms: Sequence[Arm], steps: Sequence[int], progress: Progress, cluster: Mapping[str, Any]
) -> ReplayedSteps | None:
    """Replay the arms that the trace lacks at these steps. Return None if it lacks none."""
    lacking = [arm for arm in arms if not set(steps) <= set(run.steps(REPLAY_PREFIX + arm.name))]
    if not lacking:
        return None
    found = replay(
        run.store.url, steps=comma_separated(steps), arm=lacking, model_factory=run.model_factory,
        weights_from=run.weights_from, allow_kernel=run.allow_kernel, progress=progress, **cluster,
    )  # fmt: skip
    run.look()
    return found


def comma_separated(steps: Sequence[int]) -> str:
    return ", ".join(str(int(step)) for step in steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    text: str
    train: Arm | None
    """None for a side that the remedy leaves as recorded."""
    rollout: Arm | None

    def pair(self, train: Arm | None, rollout: Arm | None) -> Pair:
        """Return the passes to compare, with these arms on the sides that the remedy changes."""
        return (
            REPLAY_PREFIX + train.name if self.train and train else TRAIN,
            REPLAY_PREFIX + rollout.name if self.rollout and rollout else ROLLOUT,
        )


def parse_remedy(text: str, engine: Arm) -> Remedy:
    """Parse the changes of both sides (`dtype=fp16`), of one (`train:lm-head=fp32`), or of each
    (`train:lm-head=fp32/rollout:dtype=fp32`). `engine` has the settings that the engine's side keeps. Raises
    InvalidOption.

    >>> parse_remedy("rollout:dtype=fp16", Arm(mode="decode")).rollout.name
    'fp16+decode'
    """
    sides: dict[str, Arm] = {}
    for part in text.split("/"):
        side, _, changes = part.strip().partition(":")
        names = [side] if side in (TRAIN, ROLLOUT) else [TRAIN, ROLLOUT]
        for name in names:
            own = changes if len(names) == 1 else part
            if name in sides or not own.strip():
                raise InvalidOption(
                    f"got {text!r}; write changes to both sides (dtype=fp16), to one (train:dtype=fp16), or to each "
                    "(train:lm-head=fp32/rollout:dtype=fp32)",
                    option="predict",
                )
            sides[name] = parse_arm(own if name == TRAIN else f"{arm_text(engine.changes)},{own}")
    return Remedy(text=text, train=sides.get(TRAIN), rollout=sides.get(ROLLOUT))


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedies:
    engine: Arm
    """Arm that repeats the recorded engine."""
    no_engine: str | None
    """Why the engine cannot be repeated, as in `Prediction.code`, or None if it can."""
    remedies: tuple[Remedy, ...]


def plan_remedies(run: RecordedRun, steps: Sequence[int], predict: Sequence[str], engine: str | None) -> Remedies:
    """Parse `predict` and `engine`. Raises InvalidOption."""
    if engine is not None and not predict:
        raise InvalidOption(f"has no effect without {option('predict')}", option="engine")
    if predict and not set(run.steps(TRAIN)) & set(run.steps(ROLLOUT)) - set(steps):
        raise InvalidOption(
            f"predictions are for steps that are not replayed; choose fewer steps with {option('steps')}",
            option="predict",
        )
    base, code = engine_arm(run, steps, engine) if predict else (Arm(), None)
    return Remedies(engine=base, no_engine=code, remedies=tuple(parse_remedy(text, base) for text in predict))


def predict_left(
    run: RecordedRun, steps: Sequence[int], plan: Remedies, progress: Progress, cluster: Mapping[str, Any]
) -> Iterator[Prediction]:
    """Yield each statistic in SIZES under each remedy at the run's other steps, predicted from replays of `steps`."""
    everything = open_database([run.store.url])
    sides = choose_sides(everything, choose_loss(everything, None)[0])
    assert sides is not None
    recorded = MismatchSums.read(everything, (TRAIN, ROLLOUT), sides, progress)
    for remedy in plan.remedies:
        pairs = (TRAIN, ROLLOUT), remedy.pair(Arm(), plan.engine), remedy.pair(remedy.train, remedy.rollout)
        problem = None
        if remedy.rollout and plan.no_engine:
            problem = plan.no_engine, ""
        elif pairs[2][0] == pairs[2][1]:
            problem = "same_execution", ""
        else:
            arms = [arm for arm in (remedy.train, remedy.rollout, remedy.rollout and plan.engine) if arm]
            try:
                replay_missing(run, list(dict.fromkeys(arms)), steps, progress, cluster)
            except (CannotReplay, NotInstalled, WeightsMissing) as error:
                problem = "not_replayed", first_line(error)
        level = recorded.at(~np.isin(recorded.step_G, steps))
        if problem is None:
            database = open_database([run.store.url], steps=comma_separated(steps))
            measured = [MismatchSums.read(database, pair, sides, progress) for pair in pairs]
            yield from _predictions(remedy, recorded, level, measured, steps)
        else:
            yield from (_prediction(remedy, metric, level, None, *problem) for metric in SIZES)


def engine_arm(run: RecordedRun, steps: Sequence[int], text: str | None) -> tuple[Arm, str | None]:
    """Return the arm that stands for the recorded engine, and why there is none."""
    if text is None and not any(contract.get("engine") == VLLM for contract in run.arms(ROLLOUT)):
        return Arm(mode="decode"), "engine_unknown"
    arm = Arm(engine=VLLM, mode="decode") if text is None else parse_arm(text)
    lags = set()
    for step in steps:
        trained = {row.seq_id: row.policy_version for row in run.step(step, TRAIN)}
        sampled = [(row.policy_version, trained.get(row.seq_id)) for row in run.step(step, ROLLOUT)]
        lags |= {None if ours == theirs else theirs for theirs, ours in sampled}
    if lags == {None} or arm.weights_version is not None:
        return arm, None
    return (arm, "mixed_versions") if len(lags) > 1 else (replace(arm, weights_version=lags.pop(), name=""), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchSums:
    """Totals per group, [G], sorted by the group's hash."""

    unit_G: np.ndarray
    step_G: np.ndarray
    columns: dict[str, Array]

    @classmethod
    def read(cls, database: Database, pair: Pair, sides: PassRoles, progress: Progress) -> MismatchSums:
        read = SequenceColumns.read(database, pair)
        unit_G, first, place_N = np.unique(read.unit_N, return_index=True, return_inverse=True)
        growth_N = read.values["sum_d"] + read.values["sum_k3"]
        values = read.values | {"growth": growth_N, "growth2": read.values["sum_expm1_2d"] - 2 * growth_N}
        columns = {name: np.bincount(place_N, values_N) for name, values_N in values.items()}
        if ADVANTAGE in sides.known:
            train, rollout = pair
            sums = read_sequence_sums(database, replace(sides, train=train, rollout=rollout, current=train), progress)
            kept_N = np.isin(sums.unit_N, unit_G)
            place_N = np.searchsorted(unit_G, sums.unit_N[kept_N])
            columns |= {
                name: np.bincount(place_N, values_N[kept_N], len(unit_G))
                for name, values_N in totals_of(sums).items() if name.startswith(("w_abs_applied", "w_size"))
            }  # fmt: skip
        return cls(unit_G=unit_G, step_G=read.step_N[first], columns=columns)

    def at(self, kept_G: np.ndarray) -> MismatchSums:
        columns = {name: values_G[kept_G] for name, values_G in self.columns.items()}
        return MismatchSums(unit_G=self.unit_G[kept_G], step_G=self.step_G[kept_G], columns=columns)

    def size(self, metric: str) -> float | None:
        """Return a statistic, or None without tokens or advantages."""
        if metric == BIAS and "w_size_positive" not in self.columns:
            return None
        with np.errstate(all="ignore"):
            value = float(SIZES[metric]({name: np.asarray(values.sum()) for name, values in self.columns.items()}))
        return value if np.isfinite(value) else None

    def step_variance(self, metric: str) -> float | None:
        """Return the variance of the statistic's logarithm between neighbouring steps, or None if it cannot be measured."""
        _, place_G = np.unique(self.step_G, return_inverse=True)
        with np.errstate(all="ignore"):
            sizes_S = SIZES[metric]({name: np.bincount(place_G, of_G) for name, of_G in self.columns.items()})
            change = np.diff(np.log(sizes_S[sizes_S > 0]))
        return float(np.mean(change**2) / 2) if len(change) else None


def _predictions(
    remedy: Remedy, recorded: MismatchSums, level: MismatchSums, measured: Sequence[MismatchSums], steps: Sequence[int]
) -> Iterator[Prediction]:
    common = measured[0].unit_G
    for sums in measured[1:]:
        common = np.intersect1d(common, sums.unit_G)
    old, base, new = (sums.at(np.isin(sums.unit_G, common)) for sums in measured)
    same = _log_ratio("mean_abs_d", base, old)
    problem = None
    if len(common) < MIN_GROUPS:
        problem = "few_groups", str(len(common))
    elif same is None or max(-same[1], same[2]) > log(SAME):
        problem = "engine_differs", "" if same is None else f"{exp(same[0]):.3g}"
    for metric in SIZES:
        interval, own = None, problem
        if own is None:
            interval, own = _interval(metric, recorded, level, (old, base, new), len({*steps}))
        yield _prediction(remedy, metric, level, interval, *(own or (None, "")))


Bounds = tuple[float, float, float]
"""Value, low, high."""


def _interval(
    metric: str,
    recorded: MismatchSums,
    level: MismatchSums,
    measured: tuple[MismatchSums, MismatchSums, MismatchSums],
    num_steps: int,
) -> tuple[Bounds | None, tuple[str, str] | None]:
    old, base, new = measured
    if metric == BIAS and "w_size_positive" not in level.columns:
        return None, ("no_advantages", "")
    if not new.columns["sum_abs_d"].any():
        return (0.0, 0.0, 0.0), None
    size = level.size(metric)
    if not size or not new.size(metric) or not old.size(metric):
        return None, ("none_seen", "")
    by_step = num_steps >= MIN_GROUPS
    ratio, other = _log_ratio(metric, new, old, by_step), _log_ratio(metric, new, base, by_step)
    if ratio is None or other is None:
        return None, ("no_interval", "")
    variance = _variance(ratio) * num_steps
    if not by_step:
        sampling, between = _log_ratio(metric, old, None), recorded.step_variance(metric)
        if sampling is None or between is None:
            return None, ("no_interval", "")
        variance = 2 * max(between - _variance(sampling) * num_steps, 0.0)
    num_steps_ahead = len({*level.step_G.tolist()})
    scatter = _NORMAL * sqrt(variance * (1 / num_steps_ahead + (0 if by_step else 1 / num_steps)))
    low, high = min(ratio[1], other[1]), max(ratio[2], other[2])
    value, low, high = (
        size * exp(ratio[0] + off) for off in (0.0, -hypot(ratio[0] - low, scatter), hypot(high - ratio[0], scatter))
    )
    width = (high - low) / (1 - value if metric == ESS else value)
    return (value, low, high), None if width <= MOST_WIDTH else ("wide", f"{width:.2g}")


_NORMAL = 1.96


def _variance(bounds: Bounds) -> float:
    return ((bounds[2] - bounds[1]) / 2 / _NORMAL) ** 2


def _log_ratio(metric: str, above: MismatchSums, below: MismatchSums | None, by_step: bool = False) -> Bounds | None:
    """Return the logarithm of two statistics' ratio, or of one, with its interval over groups or over whole steps. None
    without an interval."""
    columns = {f"above {name}": values for name, values in above.columns.items()}
    columns |= {} if below is None else {f"below {name}": values for name, values in below.columns.items()}
    if below is not None and all(np.array_equal(above.columns[name], below.columns[name]) for name in above.columns):
        return 0.0, 0.0, 0.0
    size = SIZES[metric]

    def statistic(totals: Totals) -> Array:
        with np.errstate(all="ignore"):
            value = np.log(size(_Side(totals, "above ")))
            return value if below is None else np.asarray(value - np.log(size(_Side(totals, "below "))))

    found = bootstrap({metric: statistic}, columns, above.step_G if by_step else above.unit_G, 0.95)[metric]
    if isinstance(found, NoInterval):
        return None
    value = float(statistic({name: np.asarray(values.sum()) for name, values in columns.items()}))
    return value, *found


class _Side(Mapping[str, Array]):
    def __init__(self, totals: Totals, prefix: str):
        self._totals, self._prefix = totals, prefix

    def __getitem__(self, name: str) -> Array:
        return self._totals[self._prefix + name]

    def __iter__(self) -> Any:
        return iter(())

    def __len__(self) -> int:
        return 0


def _prediction(
    remedy: Remedy, metric: str, level: MismatchSums, bounds: Bounds | None, code: str | None, detail: str
) -> Prediction:
    """Return a prediction, with 1 - ESS turned into ESS."""
    size = level.size(metric)
    value, low, high = bounds or (None, None, None)
    limit, source = UNFELT.get(metric, (-inf, None))
    below = source if high is not None and high < limit else None
    if metric == ESS:
        size, value, low, high = (None if of is None else 1 - of for of in (size, value, high, low))
    return Prediction(
        remedy=remedy.text, metric=metric, recorded=size, value=value, low=low, high=high, code=code, detail=detail,
        below=below,
    )  # fmt: skip
