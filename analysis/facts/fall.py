"""Whether a run fell: its evaluation or its reward went down for good."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

import numpy as np

from ..statistics.broken_line import break_between, break_interval
from ..statistics.noise import ENOUGH, level_deviation

FALL_SHARE = 0.09
"""Least lost share of the level before that is called a fall: a twentieth is what sound runs give back and regain."""
FALL_STAYS = 0.6
"""Least share of what follows the first window below the middle that must lie there, too: a fall is for good, a dip is not."""
FALL_HOLDS = 0.9
"""The same of a fall that is told by the noise of what was before it."""
FALL_BEYOND = 6.0
"""Least size of such a fall in standard errors, as for FALL_SD. With it 0 of 207 sound runs of eight laboratories are called fallen, and
of stationary series about as many as without up to an autocorrelation of 0.8 (0.08 instead of 0.06 of those of 100 values, 0.03 instead of
0.00 of 200); with 0.95 of those of 200 values 0.31 instead of 0.20."""
FALL_SD = 3.0
"""Least size of a fall in standard errors, beyond what choosing the best window explains."""
FALLEN = 0.35
"""Share of a fall that is lost when what happens then comes after it."""

COLLAPSE, SLOW_DECLINE = "collapse", "slow_decline"

_UNSEEN_CORRELATION = 2.0
"""Factor of the scatter where there are too few values to see how neighbours go together: that of an autocorrelation of 0.6."""

_EVALUATION = re.compile(r"(^|[/_-])(eval|val|validation|test|heldout|held_out)([/_-]|$)", re.IGNORECASE)
_OUTCOME = re.compile(
    r"reward|score|acc|pass@|success|solve|mean@|return|correct|exact_?match|win_?rate", re.IGNORECASE
)
_NO_OUTCOME = re.compile(
    r"(^|[/_@-])(std|stderr|var|variance|loss|kl|entropy|len|length|time|count|num)([/_-]|$)", re.IGNORECASE
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How well a run did, by step."""

    name: str
    """The metric, or `reward` of the recorded sequences."""
    steps: np.ndarray
    """[n] int64"""
    values: np.ndarray
    """[n] float64, finite; higher is better."""
    is_evaluation: bool
    """Whether it is of held-out data, so that a wrong reward cannot move it."""
    floor: float = 0.0
    """What doing nothing right earns: 0, or less where rewards are negative."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fall:
    """A fall of an outcome."""

    outcome: str
    onset_of: str
    """The outcome whose values give the onset: `outcome`, or the reward where that has it more exactly."""
    kind: str
    """`collapse`: most of it within a tenth of the run; else `slow_decline`."""
    step: int
    """Where it begins: the last step before the values leave what they were for good."""
    low: int
    high: int
    """Steps of which what was before and since the fall is told: breaks from `before` to `after` that fit about as well as
    the best one, up to the value after it. Too narrow for an interval."""
    interval: tuple[int, int]
    """The 95 % interval of the step at which it begins, both levels free and autocorrelation counted in: docs/evidence/intervals.md."""
    fallen: int
    """First step at which FALLEN of it is lost: what changes later is no cause."""
    before: float
    """The level that it fell from."""
    after: float
    """The mean of the run's last tenth."""
    size_in_sd: float
    """before - after, over the standard error of both."""
    floor: float = 0.0
    """The outcome's."""

    @property
    def verb(self) -> str:
        """How the outcome drops."""
        return "collapses" if self.kind == COLLAPSE else "declines slowly"

    @property
    def latest(self) -> int:
        """The last step at which it may begin or a good part of it is not yet lost: what changes later is no cause."""
        return max(self.interval[1], self.fallen)

    @property
    def share(self) -> float:
        """Lost share of what was there before, above the floor; above 1 where the outcome went below it."""
        return (self.before - self.after) / max(abs(self.before - self.floor), 1e-12)


def is_evaluation(name: str) -> bool:
    """Whether a metric's name says that it is an outcome on held-out data, or says nothing but that it is of such data."""
    if not _EVALUATION.search(name) or _NO_OUTCOME.search(name):
        return False
    return bool(_OUTCOME.search(name)) or not _EVALUATION.sub("/", _EVALUATION.sub("/", name)).strip("/_-")


def find_fall(outcome: Outcome, beside: Outcome | None = None) -> Fall | None:
    """The fall of an outcome; None where there is none that its noise does not explain.

    `beside` is the same outcome of a control that shares the seeds: what the run lost counts as sure, too, where it ends
    as far below that one, beyond the noise of their difference.

    The level before is that of the best window of a tenth of the run (at least 3 values), the level after that of the
    last one. The difference has to pass FALL_SHARE of the level before and FALL_SD standard errors, beyond what the choice of
    the best of many windows gives; or what a straight line loses from there on must; the errors are those of `level_deviation`.
    """
    values, steps = outcome.values, outcome.steps
    width = max(3, len(values) // 10)
    if len(values) < 3 * width:
        return None
    means = _means(values, width)
    best = int(np.argmax(means[: len(means) - width + 1]))
    before, after = float(means[best]), float(means[-1])
    noise = level_deviation(values)
    # The largest of m means of pure noise lies about sqrt(2 ln m) errors above their mean.
    chosen = np.sqrt(2 * np.log(max(len(values) / width, 2.0)))
    error = max(noise / np.sqrt(width), 1e-12)
    excess = (before - after) / error - chosen
    sure = excess > FALL_SD * math.sqrt(2.0) or _slope_in_sd(values[best:], noise) > FALL_SD * math.sqrt(2.0)
    least = FALL_SHARE * max(abs(before - outcome.floor), 1e-12)
    if before - after < least:
        return None
    if (
        (not sure or _settled_above(means, best, before, after))
        and not _is_beyond_what_was(outcome, means, best, width, least)
        and not (beside is not None and excess > 0 and _ends_below(outcome, beside, least))
    ):
        return None
    low, step, high = (best + index for index in break_between(values[best:], before, after))
    # The level of the best window is too high, being the best, and puts the break too early.
    first, last = (best + index for index in break_interval(values[best:], noise))
    lost_at = _first_below(values, step, width, before - 0.8 * (before - after))
    is_quick = lost_at - step <= max(width, len(values) // 10)
    return Fall(
        outcome=outcome.name,
        onset_of=outcome.name,
        kind=COLLAPSE if is_quick else SLOW_DECLINE,
        step=int(steps[step]),
        low=int(steps[low]),
        high=int(steps[min(high + 1, len(steps) - 1)]),
        interval=(int(steps[min(first, low)]), int(steps[min(max(last, high) + 1, len(steps) - 1)])),
        fallen=int(steps[_first_lost(values, step, before - FALLEN * (before - after))]),
        before=before,
        after=after,
        size_in_sd=float((before - after) / error),
        floor=outcome.floor,
    )


def _is_beyond_what_was(outcome: Outcome, means: np.ndarray, best: int, width: int, least: float) -> bool:
    """Whether the last fifth lies as far below the best window as noise up to there does not explain, and all since the fall is low.

    What swings or climbs back after a fall has autocorrelation that the run before it did not have.
    """
    values = outcome.values
    until = values[: best + width]
    if len(until) < 2 * width:
        return False
    before, after = float(means[best]), max(float(means[-1]), float(values[-max(3, len(values) // 5) :].mean()))
    chosen = np.sqrt(2 * np.log(max(len(values) / width, 2.0)))
    scatter = level_deviation(until) * (1.0 if len(until) >= ENOUGH else _UNSEEN_CORRELATION)
    if before - after < least or before - after <= (FALL_BEYOND + chosen) * scatter / np.sqrt(width):
        return False
    lost = before - means[best:]
    since = int(np.argmax(lost > 0.5 * (before - after)))
    return bool((lost[since:] > FALLEN * (before - after)).mean() >= FALL_HOLDS)


def _ends_below(outcome: Outcome, beside: Outcome, least: float) -> bool:
    """Whether an outcome ends by `least` below a control's, in its last fifth, beyond the noise of their difference."""
    _, of_run, of_control = np.intersect1d(outcome.steps, beside.steps, return_indices=True)
    lacks = beside.values[of_control] - outcome.values[of_run]
    width = max(3, len(lacks) // 5)
    if len(lacks) < 3 * width or np.ptp(lacks) == 0:
        return False
    lacking = float(lacks[-width:].mean())
    return lacking > least and lacking > FALL_SD * math.sqrt(2.0) * level_deviation(lacks) / math.sqrt(width)


def _means(values: np.ndarray, width: int) -> np.ndarray:
    """The mean of each window of `width` values."""
    return np.convolve(values, np.ones(width) / width, mode="valid")


def refined(fall: Fall, finer: Fall | None) -> Fall:
    """A fall with the onset of another outcome's, where that one is seen at more steps and lies within its interval."""
    if finer is None or finer.high < fall.low or finer.low > fall.high:
        return fall
    if finer.high - finer.low >= fall.high - fall.low:
        return fall
    return replace(
        fall, onset_of=finer.onset_of, step=finer.step, low=finer.low, high=finer.high, interval=finer.interval,
        fallen=finer.fallen,
    )  # fmt: skip


def _slope_in_sd(values: np.ndarray, noise: float) -> float:
    """How steeply values go down: what a straight line loses from end to end, over its standard error."""
    n = len(values)
    at = np.arange(n) - (n - 1) / 2
    loss = -(n - 1) * float(at @ values) / max(float(at @ at), 1e-12)
    return loss / max(noise * math.sqrt(12 / n), 1e-12)


def _settled_above(means: np.ndarray, best: int, before: float, after: float) -> bool:
    """Whether the windows go back for long above the middle of both, and above what counts as fallen: a passing dip."""
    for share in (0.5, FALLEN):
        lower = means[best:] < before - share * (before - after)
        if lower[int(np.argmax(lower)) :].mean() >= FALL_STAYS:
            return False
    return True


def _first_lost(values: np.ndarray, start: int, level: float) -> int:
    """The first index from which two values in a row are below a level."""
    lost = values[start:] < level
    twice = np.flatnonzero(lost & np.r_[lost[1:], True])
    return start + int(twice[0]) if len(twice) else len(values) - 1


def _first_below(values: np.ndarray, start: int, width: int, level: float) -> int:
    half = max(width // 2, 1)
    for i in range(start, len(values)):
        if values[max(start, i - half) : i + half + 1].mean() <= level:
            return i
    return len(values) - 1
