"""Shapes: n steps, shared by all series in a run."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from ..statistics.intervals import f_quantile
from ..statistics.location import break_between, break_interval
from ..statistics.noise import ENOUGH, level_deviation, without_line
from ..trace.database import Database

Array = np.ndarray

LINEAR, LOG, LOGIT = "linear", "log", "logit"
MISMATCH, OPTIMIZER, REWARD, LENGTH, ENTROPY, POLICY, WEIGHTS = (
    "mismatch", "optimizer", "reward", "length", "entropy", "policy", "weights",
)  # fmt: skip

KINDS: dict[str, tuple[str, str]] = {
    "k3": (MISMATCH, LOG), "mean_abs_d": (MISMATCH, LOG), "p99_abs_d": (MISMATCH, LOG), "max_abs_d": (MISMATCH, LOG),
    "mean_d": (MISMATCH, LINEAR), "k3_positive": (MISMATCH, LOG), "k3_negative": (MISMATCH, LOG), "ess": (MISMATCH, LOGIT),
    "reward": (REWARD, LINEAR), "reward_std_within_groups": (REWARD, LINEAR), "share_groups_without_spread": (REWARD, LOGIT),
    "length": (LENGTH, LOG), "share_length_limited": (LENGTH, LOGIT), "entropy": (ENTROPY, LOG),
    "grad_norm": (OPTIMIZER, LOG), "loss": (OPTIMIZER, LINEAR), "learning_rate": (OPTIMIZER, LINEAR),
    "update_to_weight": (OPTIMIZER, LOG), "adam_second_moment": (OPTIMIZER, LOG),
    "policy_lag": (POLICY, LINEAR), "version_lag": (POLICY, LINEAR), "clip_share": (POLICY, LOGIT),
    "changed_weights": (WEIGHTS, LOGIT),
}  # fmt: skip
"""The kind of each series, and the scale on which its changes are detected."""


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    steps: Array
    values: Array
    scale: str
    kind: str
    source: str = ""
    not_finite: Array = field(default_factory=lambda: np.empty(0, np.int64))
    logged: str = ""

    @property
    def known(self) -> Array:
        return np.asarray(np.isfinite(self.values))

    @property
    def not_finite_since(self) -> int | None:
        """First step with a non-finite value after the last finite value, or None if there is no such step."""
        is_number = self.known & ~np.isin(self.steps, self.not_finite)
        since = self.not_finite[self.not_finite > self.steps[is_number].max(initial=-1)]
        return int(since[0]) if len(since) else None

    @property
    def scaled(self) -> Array:
        """[n] values converted to `scale`. On a log scale, zeros are replaced by half the smallest positive value."""
        if self.scale == LINEAR or not self.known.any():
            return self.values.copy()
        if self.scale == LOG:
            return np.asarray(np.log(_off_zero(self.values)))
        return np.asarray(np.log(_off_zero(self.values)) - np.log(_off_zero(1.0 - self.values)))


def _off_zero(values: Array) -> Array:
    above = values[values > 0]
    if not len(above):
        return np.where(np.isfinite(values), 1.0, np.nan)
    return np.asarray(np.maximum(values, max(above.min() / 2, 1e-9 * float(np.median(above)))))


def named(
    name: str, steps: Array, values: Array, source: str, not_finite: Array | None = None, logged: str = ""
) -> Series:
    kind, scale = KINDS.get(name, (REWARD, LINEAR))  # names outside KINDS belong to evaluations
    infinite = np.isinf(values)
    without_value = steps[infinite] if not_finite is None else np.union1d(steps[infinite], not_finite)
    return Series(name, steps, np.where(infinite, np.nan, values), scale, kind, source, without_value, logged)


def by_step(database: Database, query: str, values: Mapping[str, object] | None = None) -> dict[str, np.ndarray]:
    rows = database.connection.execute(query, dict(values or {})).fetchnumpy()
    steps = np.asarray(rows.pop("step"), np.int64)  # float64 cannot hold all int64 values
    return {"step": steps} | {
        name: np.asarray(np.ma.filled(column.astype(np.float64), np.nan)) for name, column in rows.items()
    }


def columns_of(
    rows: dict[str, Array], sources: Mapping[str, str], not_finite: Mapping[str, Array] | None = None
) -> list[Series]:
    columns = []
    for name, source in sources.items():
        if name in rows:
            lacking = (not_finite or {}).get(name, np.empty(0, np.int64))
            has = ~np.isnan(rows[name]) | np.isin(rows["step"], lacking)
            columns.append(named(name, rows["step"][has], rows[name][has], source, lacking))
    return [column for column in columns if len(column.steps)]


FALL_SHARE = 0.09
"""Minimum fraction of its earlier level that an outcome must lose to count as a drop. Healthy runs temporarily lose
up to 5%."""
FALL_STAYS = 0.6
"""A drop counts as lasting if, once the outcome has crossed the drop's midpoint, at least this fraction of windows
stays below the midpoint."""
FALL_HOLDS = 0.9
"""Replaces FALL_STAYS in the second test (see FALL_BEYOND)."""
FALL_BEYOND = 6.0
"""Minimum drop in a second test, which estimates the noise from the values before the drop (same unit as FALL_SD).

The second test caused no false alarm in 238 healthy runs from ten benchmark suites. In stationary series with
autocorrelation up to 0.8, it increases the false-alarm rate from 0.04 to 0.13 (100 values) and from 0.01 to 0.04 (200
values). With autocorrelation 0.95, it increases the rate from 0.13 to 0.24 (200 values)."""
FALL_SD = 3.0
"""Minimum drop in standard errors, after subtracting the bias that comes from choosing the best window."""
FALLEN = 0.35
"""A change after this fraction of the drop is too late to have caused it."""

COLLAPSE, SLOW_DECLINE, FLAT = "collapse", "slow_decline", "flat"
FLAT_SHARE = 0.5
"""A run is judged flat if it rises by less than this fraction of its baseline's rise. None of 392 healthy runs was
judged flat."""

SPARSE = 1 / 3
"""A score counts as sparse if it is logged at no more than this fraction of the steps with training metrics."""

_UNSEEN_CORRELATION = 2.0
"""Factor applied to the scatter if the autocorrelation r cannot be estimated: sqrt((1 + r) / (1 - r)) for r = 0.6."""
_LEVEL = 0.99

_EVALUATION = re.compile(
    r"(^|[/_-])(eval|evals|evaluation|val|valid|validation|test|dev|held[_-]?out|hold[_-]?out|benchmarks?)([/_-]|$)",
    re.IGNORECASE,
)
_OUTCOME = re.compile(
    r"reward|score|acc|pass@|success|solve|mean@|return|correct|exact_?match|win_?rate", re.IGNORECASE
)
_NO_OUTCOME = re.compile(
    r"(^|[/_@-])(std|stderr|var|variance|loss|nll|ppl|perplexity|kl|entropy|len|length|time|runtime|seconds?|count|num|n|steps?|"
    r"epoch|samples|tokens|errors?|wer|cer|mse|rmse|mae|cost|lr|grad|norm|clip\w*|trunc\w*|cut|frac|fraction|share)([/_@-]|$)",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    name: str
    steps: np.ndarray
    values: np.ndarray
    """[n] finite float64. Higher is better."""
    is_evaluation: bool
    floor: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fall:
    outcome: str
    onset_of: str
    kind: str
    """`collapse` if most of the drop happens within a tenth of the run, else `slow_decline`. `flat` if there is no
    drop, but the baseline rises and the run does not."""
    step: int
    """Onset of the drop: the last step before the values permanently leave their earlier level."""
    low: int
    high: int
    """Onsets from `low` to `high` fit about as well as `step`. This range is narrower than `interval`."""
    interval: tuple[int, int]
    """95% confidence interval for the onset, allowing for autocorrelated noise. See docs/evidence/intervals.md."""
    fallen: int
    """First step at which the fraction FALLEN of the drop has happened. Later changes cannot have caused the drop."""
    before: float
    """Level before the drop. For `flat`, the level that the baseline reaches."""
    after: float
    size_in_sd: float
    floor: float = 0.0

    @property
    def verb(self) -> str:
        return "collapses" if self.kind == COLLAPSE else "declines slowly"

    @property
    def course(self) -> str:
        if self.kind == FLAT:
            return f"{self.outcome} stays at {self.after:.3g} while the baseline's rises to {self.before:.3g}, diverging after"
        return f"{self.outcome} drops from {self.before:.3g} to {self.after:.3g} after"

    @property
    def latest(self) -> int:
        return max(self.interval[1], self.fallen)

    @property
    def share(self) -> float:
        """Drop divided by the earlier level's height above the floor. Above 1 if the outcome ends below the floor."""
        return (self.before - self.after) / max(abs(self.before - self.floor), 1e-12)


def is_evaluation(name: str, *, is_sparse: bool = False) -> bool:
    """True if the name suggests an outcome on held-out data, such as `eval/reward`, `eval/gsm8k` or just `eval`.

    A score that is logged at few steps (`is_sparse`) is an evaluation under any name.
    """
    is_held_out = _EVALUATION.search(name) or (is_sparse and _OUTCOME.search(name))
    return bool(is_held_out) and not _NO_OUTCOME.search(name)


def is_named_outcome(name: str) -> bool:
    """True if an evaluation's name denotes a score (`eval/reward`) and not just the data (`eval/gsm8k`)."""
    return bool(_OUTCOME.search(name)) or not _EVALUATION.sub("/", _EVALUATION.sub("/", name)).strip("/_-")


def find_fall(outcome: Outcome, beside: Outcome | None = None) -> Fall | None:
    """Return the drop in an outcome, or None if noise can explain it.

    `beside` is the same outcome in a baseline run with the same seeds. A decline also counts as a drop if the run ends
    below the baseline by FALL_SHARE and by more than the noise in their difference.
    """
    values, steps = outcome.values, outcome.steps
    width = max(3, len(values) // 10)
    if len(values) < 2 * width:
        return None
    means = _means(values, width)
    best = int(np.argmax(means[: len(means) - width + 1]))
    before, after = float(means[best]), float(means[-1])
    noise = level_deviation(values)
    # Subtract the selection effect: in pure noise, the largest of m means is about sqrt(2 ln m) standard errors above
    # their average.
    chosen = np.sqrt(2 * np.log(max(len(values) / width, 2.0)))
    error = max(noise / np.sqrt(width), 1e-12)
    excess = (before - after) / error - chosen
    sure = excess > FALL_SD * math.sqrt(2.0) or _slope_in_sd(values[best:], noise) > FALL_SD * math.sqrt(2.0)
    least = FALL_SHARE * max(abs(before - outcome.floor), 1e-12)
    if before - after < least:
        return None
    is_fall = sure and not _settled_above(means, best, before, after)
    is_fall = is_fall or _is_beyond_what_was(outcome, means, best, width, least)
    if not is_fall and not (beside is not None and excess > 0 and _ends_below(outcome, beside, least)):
        return None
    low, step, high = (best + index for index in break_between(values[best:], before, after))
    # break_interval fits the levels itself, because the best window's level is biased upwards and would make the drop
    # start too early.
    first, last = (best + index for index in break_interval(values[best:], noise))
    lost_at = _first_below(values, step, width, before - 0.8 * (before - after))
    is_quick = lost_at - step <= max(width, len(values) // 10)
    return Fall(
        outcome=outcome.name, onset_of=outcome.name, kind=COLLAPSE if is_quick else SLOW_DECLINE, step=int(steps[step]),
        low=int(steps[low]), high=int(steps[min(high + 1, len(steps) - 1)]),
        interval=(int(steps[min(first, low)]), int(steps[min(max(last, high) + 1, len(steps) - 1)])),
        fallen=int(steps[_first_lost(values, step, before - FALLEN * (before - after))]),
        before=before, after=after, size_in_sd=float((before - after) / error), floor=outcome.floor,
    )  # fmt: skip


def find_gap(outcome: Outcome, baseline: Outcome) -> Fall | None:
    steps, run, other = shared_values(outcome, baseline)
    return find_fall(replace(outcome, steps=steps, values=float(other.mean()) + (run - other)))


def shared_values(a: Outcome | Series, b: Outcome | Series) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the steps at which both runs have a finite value, and the values of each."""
    steps, at_a, at_b = np.intersect1d(a.steps, b.steps, return_indices=True)
    of_a, of_b = a.values[at_a], b.values[at_b]
    known = np.isfinite(of_a) & np.isfinite(of_b)
    return steps[known], of_a[known], of_b[known]


def find_flat(outcome: Outcome, baseline: Outcome) -> Fall | None:
    """Find where an outcome stops rising while its baseline keeps rising. Return None if noise can explain that."""
    found = find_gap(replace(outcome, floor=baseline.floor), baseline)
    if found is None:
        return None
    steps, run, other = shared_values(outcome, baseline)
    first, last = max(1, len(run) // 10), max(3, len(run) // 5)
    begins, ends, reached = min(run[:first].mean(), other[:first].mean()), run[-last:].mean(), other[-last:].mean()
    sure = FALL_SD * math.sqrt(2.0) * level_deviation(other) / math.sqrt(first)
    least = max(sure, FALL_SHARE * abs(reached - baseline.floor))
    if reached - begins <= least or ends - begins >= FLAT_SHARE * (reached - begins):
        return None
    num_equal = int(np.flatnonzero(run != other)[0])
    earliest = int(steps[num_equal - 1]) if num_equal else min(1, int(steps[0]))

    def bound(step: int) -> int:
        return max(step, earliest) if step > steps[0] else earliest

    return replace(
        found, kind=FLAT, before=float(reached), after=float(ends), step=bound(found.step), low=bound(found.low),
        high=bound(found.high), interval=(bound(found.interval[0]), bound(found.interval[1])), fallen=bound(found.fallen),
    )  # fmt: skip


def _is_beyond_what_was(outcome: Outcome, means: np.ndarray, best: int, width: int, least: float) -> bool:
    values = outcome.values
    until = values[: best + width]
    recent = until[-3 * width :]
    if len(recent) < 4:
        return False
    before, after = float(means[best]), max(float(means[-1]), float(values[-max(3, len(values) // 5) :].mean()))
    chosen = np.sqrt(2 * np.log(max(len(values) / width, 2.0)))
    scatter = level_deviation(until) if len(until) >= 2 * width else math.inf
    if len(until) < ENOUGH:
        freedom = len(recent) - 2
        student = math.sqrt(f_quantile(_LEVEL, 1, freedom) / f_quantile(_LEVEL, 1, 10**6))
        around_line = float(np.linalg.norm(without_line(recent))) / math.sqrt(freedom)
        scatter = min(scatter * _UNSEEN_CORRELATION, around_line * student)
    if before - after < least or before - after <= (FALL_BEYOND + chosen) * scatter / np.sqrt(width):
        return False
    lost = before - means[best:]
    since = int(np.argmax(lost > 0.5 * (before - after)))
    return bool((lost[since:] > FALLEN * (before - after)).mean() >= FALL_HOLDS)


def _ends_below(outcome: Outcome, beside: Outcome, least: float) -> bool:
    _, of_run, of_control = shared_values(outcome, beside)
    lacks = of_control - of_run
    width = max(3, len(lacks) // 5)
    if len(lacks) < 3 * width or np.ptp(lacks) == 0:
        return False
    lacking = float(lacks[-width:].mean())
    return lacking > least and lacking > FALL_SD * math.sqrt(2.0) * level_deviation(lacks) / math.sqrt(width)


def _means(values: np.ndarray, width: int) -> np.ndarray:
    return np.convolve(values, np.ones(width) / width, mode="valid")


def refined(fall: Fall | None, finer: Fall | None) -> Fall | None:
    """Return `fall`, with the onset of `finer` if it is compatible and more precise. If one is None, return the
    other."""
    if fall is None or finer is None:
        return fall or finer
    if finer.high < fall.low or finer.low > fall.high or finer.high - finer.low >= fall.high - fall.low:
        return fall
    where = {name: getattr(finer, name) for name in ("onset_of", "step", "low", "high", "interval", "fallen", "kind")}
    return replace(fall, **where)


def _slope_in_sd(values: np.ndarray, noise: float) -> float:
    n = len(values)
    at = np.arange(n) - (n - 1) / 2
    loss = -(n - 1) * float(at @ values) / max(float(at @ at), 1e-12)
    return loss / max(noise * math.sqrt(12 / n), 1e-12)


def _settled_above(means: np.ndarray, best: int, before: float, after: float) -> bool:
    lower = [means[best:] < before - share * (before - after) for share in (0.5, FALLEN)]
    return all(each[int(np.argmax(each)) :].mean() < FALL_STAYS for each in lower)


def _first_lost(values: np.ndarray, start: int, level: float) -> int:
    lost = values[start:] < level
    twice = np.flatnonzero(lost & np.r_[lost[1:], True])
    return start + int(twice[0]) if len(twice) else len(values) - 1


def _first_below(values: np.ndarray, start: int, width: int, level: float) -> int:
    half, places = max(width // 2, 1), range(start, len(values))
    return next((i for i in places if values[max(start, i - half) : i + half + 1].mean() <= level), len(values) - 1)
