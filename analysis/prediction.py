"""Predict the mismatch that a remedy would leave at steps that are not replayed.

A remedy replaces the arm of the trainer, of the engine, or of both. The prediction is the statistic under the remedy
at the replayed steps, times (recorded statistic at the other steps / recorded statistic at the replayed steps)^power.

With 8 or more replayed steps, the power is the slope of a regression over steps: the log of the remedied statistic on the
log of the recorded one (the regression estimator of survey sampling; Cochran, Sampling Techniques, chapter 7). It is
limited to the range from 0 (no relation) to 1 (a constant ratio). The interval comes from a bootstrap over steps.

With fewer steps, the power is 0.5, and the interval comes from a bootstrap over groups, widened by the scatter between
steps. The weights are rounded differently at every step, so the noise of the statistics with and without the remedy is
assumed to be independent: their log ratio has twice the noise variance of the recorded statistic's logarithm. This
doubled variance is estimated by the mean squared change of that logarithm between neighbouring steps. The interval
covers every power from 0 to 1.

Shapes: N sequences, G groups, S steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import exp, hypot, inf, log, nan, sqrt

import numpy as np

from ..replay.arm_option import VLLM
from ..replay.arms import Arm, arm_text, parse_arm
from ..replay.engine import replay_missing
from ..replay.recorded import RecordedRun
from ..schemas.errors import CannotReplay, InvalidOption, NotInstalled, WeightsMissing, option
from ..schemas.passes import REPLAY_PREFIX, ROLLOUT, TRAIN
from ..tracer.progress import Progress
from ..tracer.store import first_line
from .gate.condition import SequenceColumns
from .objective.figures import FIGURES, as_float, totals_of
from .objective.pass_roles import ADVANTAGE, PassRoles, choose_loss, choose_sides
from .objective.sums import read_sequence_sums
from .statistics.estimators import FROM_SUMS, Array, Totals
from .statistics.intervals import MIN_GROUPS, bootstrap, ends
from .trace.database import Database
from .trace.source import Pair
from .views import open_database

CONFIDENCE, _NORMAL = 0.9, 1.645
MOST_WIDTH = 0.4
"""A prediction is considered reliable only if its interval is at most this wide, relative to the predicted value."""
UNKNOWN_POWER = 0.5, 0.5
"""Power assumed if there are too few steps to estimate it, and its error: 0.5 +- 0.5 covers 0 to 1."""
SAME = 1.25
"""A replayed engine is accepted in place of the recorded engine if their mean |d| agree within this factor."""
ESS, BIAS = "ess_token", "relative_abs_bias"
SIZES: Mapping[str, Callable[[Totals], Array]] = {
    **{name: FROM_SUMS[name] for name in ("mean_abs_d", "k3", "share_outside")},
    ESS: lambda t: (t["v"] - t["u"] ** 2 / t["num_tokens"]) / (t["num_tokens"] + 2 * t["u"] + t["v"]),
    BIAS: FIGURES[BIAS].value,
}
"""Statistics that are 0 without a mismatch. For ESS, 1 - ESS = n var(w) / sum w^2 with w = exp(d) is computed from
u = sum (w - 1) and v = sum (w - 1)^2, to avoid cancellation."""
UNFELT = {
    "mean_abs_d": (0.0165, "IsoExec, vllm.ai 2026-08-21"),
    "k3": (1e-5, "Miles and SGLang, All-in-One"),
}
"""Published mismatches whose removal did not raise the reward. IsoExec: 50 steps of a 35B-A3B mixture of experts.
Miles: dense models with k3 from 1e-5 to 1e-3 (the lower end is used)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Mismatch predicted under a remedy at steps that were not replayed, with a 90% interval."""

    remedy: str
    metric: str
    """mean_abs_d or k3 (nats), share_outside (share of ratios outside 0.8 to 1.25), ess_token, or relative_abs_bias,
    which is the objective's sum |b| / sum |f(rho*)| at the first update of a step."""
    recorded: float | None
    value: float | None
    low: float | None
    high: float | None
    code: str | None
    """Code of the reason why the prediction is missing or unreliable, or None."""
    detail: str
    """Number or error message that belongs to `code`, or an empty string."""
    below: str | None
    """Publication in which removing a larger mismatch did not raise the reward, or None."""


Sums = dict[str, np.ndarray]
"""Arrays [G] by column name, with the totals of each group. `unit` is the hash of the group, and `step` is its step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    text: str
    arms: list[Arm]
    pairs: list[Pair]
    """The three pairs of trainer and engine passes to compare: as recorded, replayed unchanged, and replayed with the
    remedy. A side that the remedy does not change keeps its recorded pass."""
    problem: str | None
    """Code of the reason why no prediction is possible, as in `Prediction.code`, or None."""


def listed(steps: Sequence[int]) -> str:
    return ", ".join(str(int(step)) for step in steps)


def parse_remedies(run: RecordedRun, steps: Sequence[int], predict: Sequence[str], engine: str | None) -> list[Remedy]:
    """Parse remedies. A remedy changes both sides (`dtype=fp16`), one side (`train:lm-head=fp32`), or each side in a
    different way (changes separated by a slash).

    A remedy for the engine is applied to the arm that replays the engine unchanged. Raises InvalidOption.
    """
    if engine is not None and not predict:
        raise InvalidOption(f"this option has no effect without {option('predict')}", option="engine")
    if predict and not set(run.steps(TRAIN)) & set(run.steps(ROLLOUT)) - set(steps):
        why = f"a prediction needs recorded steps that are not replayed; choose fewer with {option('steps')}"
        raise InvalidOption(why, option="predict")
    base, no_engine = _engine(run, steps, engine) if predict else (Arm(), None)
    found = []
    for text in predict:
        sides = dict(part.strip().partition(":")[::2] for part in text.split("/"))
        if not sides.keys() <= {TRAIN, ROLLOUT}:
            sides = {TRAIN: text, ROLLOUT: text}
        repeated, changed = {TRAIN: Arm(), ROLLOUT: base}, dict[str, Arm]()
        for side, changes in sides.items():
            changed[side] = parse_arm(changes if side == TRAIN else f"{arm_text(base.changes) or ''},{changes}")
        arms = [*changed.values(), *([base] if ROLLOUT in sides else [])]
        before, after = (
            {side: REPLAY_PREFIX + by_side[side].name if side in sides else side for side in (TRAIN, ROLLOUT)}
            for by_side in (repeated, changed)
        )
        problem = "same_execution" if after[TRAIN] == after[ROLLOUT] else no_engine if ROLLOUT in sides else None
        pairs = [(TRAIN, ROLLOUT), *((names[TRAIN], names[ROLLOUT]) for names in (before, after))]
        found.append(Remedy(text=text, arms=arms, pairs=pairs, problem=problem))
    return found


def _engine(run: RecordedRun, steps: Sequence[int], text: str | None) -> tuple[Arm, str | None]:
    if text is None and not any(contract.get("engine") == VLLM for contract in run.arms(ROLLOUT)):
        return Arm(mode="decode"), "engine_unknown"
    arm = parse_arm(text or "engine=vllm,mode=decode")
    query = f"""
        SELECT DISTINCT CASE WHEN theirs <> ours THEN theirs END FROM (
            SELECT coalesce(r.policy_version, s.policy_version) AS theirs, coalesce(t.policy_version, s.policy_version) AS ours
            FROM scores AS r JOIN scores AS t USING (run, step, seq_id) JOIN sequences AS s USING (run, step, seq_id)
            WHERE r."pass" = '{ROLLOUT}' AND t."pass" = '{TRAIN}' AND step IN ({listed(steps)}))
    """
    lags = [version for (version,) in open_database([run.store.url]).connection.execute(query).fetchall()]
    if arm.weights_version is not None or set(lags) <= {None}:
        return arm, None
    return (arm, "mixed_versions") if len(lags) > 1 else (replace(arm, weights_version=lags[0], name=""), None)


def predictions(
    run: RecordedRun, steps: Sequence[int], remedies: Sequence[Remedy], progress: Progress, *, ray: str | None,
    gpus_per_arm: float | None,
) -> Iterator[Prediction]:  # fmt: skip
    """Replay `steps` with each remedy, and yield a prediction of each statistic in SIZES at the other steps."""
    everything = open_database([run.store.url])
    sides = choose_sides(everything, choose_loss(everything, None)[0])
    assert sides is not None
    recorded = read_sums(everything, (TRAIN, ROLLOUT), sides, progress)
    level = _where(recorded, ~np.isin(recorded["step"], steps))
    for remedy in remedies:
        problem, measured = (remedy.problem, "") if remedy.problem else None, list[Sums]()
        if problem is None:
            try:
                replay_missing(run, remedy.arms, steps, progress, ray=ray, gpus_per_arm=gpus_per_arm)
                database = open_database([run.store.url], steps=listed(steps))
                measured = [read_sums(database, pair, sides, progress) for pair in remedy.pairs]
                common = reduce(np.intersect1d, (sums["unit"] for sums in measured))
                measured = [_where(sums, np.isin(sums["unit"], common)) for sums in measured]
                same = _log_ratio("mean_abs_d", measured[1], measured[0], by_step=False)
                if len(common) < MIN_GROUPS:
                    problem = "few_groups", str(len(common))
                elif same is None or max(-same[1], same[2]) > log(SAME):
                    problem = "engine_differs", f"{exp(same[0]):.3g}" if same else "an unknown number of"
            except (CannotReplay, NotInstalled, WeightsMissing) as error:
                problem = "not_replayed", first_line(error)
        for metric in SIZES:
            bounds, code = (None, problem) if problem else _interval(metric, recorded, level, measured)
            size = as_float(size_of(metric, level)[0])
            value, low, high = bounds or (None, None, None)
            limit, source = UNFELT.get(metric, (-inf, None))
            below = source if high is not None and high < limit else None
            if metric == ESS:
                size, value, low, high = (None if of is None else 1 - of for of in (size, value, high, low))
            yield Prediction(
                remedy=remedy.text, metric=metric, recorded=size, value=value, low=low, high=high, below=below,
                code=code and code[0], detail=code[1] if code else "",
            )  # fmt: skip


def read_sums(database: Database, pair: Pair, sides: PassRoles, progress: Progress) -> Sums:
    read = SequenceColumns.read(database, pair)
    unit_G, first, place_N = np.unique(read.unit_N, return_index=True, return_inverse=True)
    values = {name: read.values[name] for name in ("num_tokens", "num_outside", "sum_abs_d", "sum_k3")}
    values["u"] = read.values["sum_d"] + read.values["sum_k3"]
    values["v"] = read.values["sum_expm1_2d"] - 2 * values["u"]
    found = {name: np.bincount(place_N, of_N).astype(np.float64) for name, of_N in values.items()}
    if ADVANTAGE in sides.known:
        roles = replace(sides, train=pair[0], rollout=pair[1], current=pair[0])
        sums = read_sequence_sums(database, roles, progress)
        kept_N, totals = np.isin(sums.unit_N, unit_G), totals_of(sums)
        place_N = np.searchsorted(unit_G, sums.unit_N[kept_N])
        for name in (f"w_{of}_{sign}" for of in ("abs_applied", "size") for sign in ("positive", "negative")):
            found[name] = np.bincount(place_N, totals[name][kept_N], len(unit_G)).astype(np.float64)
    return found | {"unit": unit_G, "step": read.step_N[first]}


def _where(sums: Sums, kept_G: np.ndarray) -> Sums:
    return {name: values_G[kept_G] for name, values_G in sums.items()}


def size_of(metric: str, sums: Sums, place_G: np.ndarray | None = None) -> Array:
    """Return a statistic for each index in `place_G`, over the groups with this index (default: over all groups, [1]).
    NaN without tokens, or if it needs advantages that were not recorded."""
    place_G = np.zeros(len(sums["unit"]), int) if place_G is None else place_G
    if metric == BIAS and "w_size_positive" not in sums:
        return np.full(1, nan)
    with np.errstate(all="ignore"):
        totals = {name: np.bincount(place_G, of_G).astype(np.float64) for name, of_G in sums.items() if name != "unit"}
        return SIZES[metric](totals)


Bounds = tuple[float, float, float]
"""A value and the bounds of its interval."""
Code = tuple[str, str]
"""The fields `code` and `detail` of a `Prediction`."""


def _interval(metric: str, recorded: Sums, level: Sums, measured: Sequence[Sums]) -> tuple[Bounds | None, Code | None]:
    old, repeated, new = measured
    size, *seen = (float(size_of(metric, sums)[0]) for sums in (level, old, new))
    if np.isnan(size):
        return None, ("no_advantages", "")
    if not new["sum_abs_d"].any():
        return (0.0, 0.0, 0.0), None
    if _are_equal(new, repeated):
        return (size, size, size), None
    if not (size > 0 and min(seen) > 0):
        return None, ("none_seen", "")
    num_replayed, num_others = (len(np.unique(sums["step"])) for sums in (old, level))
    by_step = num_replayed >= MIN_GROUPS
    power, error = _power(metric, old, new) if by_step else UNKNOWN_POWER
    one, other = (_log_ratio(metric, new, below, by_step, power) for below in (old, repeated))
    if one is None or other is None:
        return None, ("no_interval", "")
    off, low, high = one[0], min(one[1], other[1]), max(one[2], other[2])
    scatter = (high - low) / 2 * sqrt(num_replayed / num_others)
    if not by_step:
        change = np.diff(_log_by_step(metric, recorded))
        scatter = _NORMAL * sqrt(np.mean(change**2) * (1 / num_replayed + 1 / num_others))
    shift = error * abs(log(size / seen[0]))
    value = size**power * exp(off)
    below, above = (max(hypot(side, scatter), shift) for side in (off - low, high - off))
    low, high = value * exp(-below), value * exp(above)
    width = (high - low) / (1 - value if metric == ESS else value)
    return (value, low, high), None if width <= MOST_WIDTH else ("wide", f"{width:.2g}")


def _power(metric: str, old: Sums, new: Sums) -> tuple[float, float]:
    """Fit new ~ old^power, and return the power, limited to the range from 0 to 1, and the half-width of its interval:
    1.645 times the standard deviation of the residuals, divided by that of log old."""
    x_S, y_S = (_log_by_step(metric, sums) for sums in (old, new))
    if len(x_S) != len(y_S) or len(x_S) < MIN_GROUPS or not x_S.std():
        return UNKNOWN_POWER
    slope = np.cov(x_S, y_S, bias=True)[0, 1] / x_S.var()
    return float(np.clip(slope, 0, 1)), _NORMAL * float(np.std(y_S - slope * x_S) / x_S.std())


def _log_by_step(metric: str, sums: Sums) -> Array:
    """Return the logarithm of a statistic at each step where it is not 0."""
    sizes_S = size_of(metric, sums, np.unique(sums["step"], return_inverse=True)[1])
    return np.asarray(np.log(sizes_S[sizes_S > 0]))


def _are_equal(one: Sums, other: Sums) -> bool:
    return all(np.array_equal(one[name], other[name]) for name in one)


def _log_ratio(metric: str, above: Sums, below: Sums, by_step: bool, power: float = 1.0) -> Bounds | None:
    """Return log(above / below^power) for a statistic, with its interval over steps or groups, or None without one."""
    names = above.keys() - {"unit", "step"}
    columns = {f"{side} {name}": sums[name] for side, sums in (("above", above), ("below", below)) for name in names}
    if power == 1 and _are_equal(above, below):
        return 0.0, 0.0, 0.0

    def statistic(totals: Totals) -> Array:
        sizes = [SIZES[metric]({name: totals[f"{side} {name}"] for name in names}) for side in ("above", "below")]
        return np.asarray(np.log(sizes[0]) - power * np.log(sizes[1]))

    found = ends(bootstrap({metric: statistic}, columns, above["step" if by_step else "unit"], CONFIDENCE)[metric])
    value = float(statistic({name: np.asarray(of_G.sum()) for name, of_G in columns.items()}))
    return (value, *found) if found else None
