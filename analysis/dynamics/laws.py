"""Laws that a run's series are held against: how fast the mismatch compounds, and reward against entropy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..statistics.intervals import student_quantile
from ..statistics.noise import highest_long_run_variance
from .changes import SHIFT, ChangePoint
from .quantities import Series

FEWEST = 8
"""Steps that a line is fitted to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """The slope of ln k3 against the step."""

    part: str
    """`run`, or `last third` of its steps."""
    num_steps: int
    slope: float
    """1 / step."""
    low: float
    high: float
    """The 95 % interval of the slope, autocorrelation counted in: docs/evidence/intervals.md."""
    growth: float
    """Factor of a step less 1: exp(slope) - 1."""
    doubling: float | None
    """Steps in which k3 doubles, negative where it halves; None where the interval holds 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EntropyLaw:
    """R = -a exp(H) + b fitted to the steps of a run (arXiv 2505.22617): reward bought with entropy."""

    num_steps: int
    a: float
    b: float
    """The reward that the law foretells where the entropy is used up is b - a, at H = 0."""
    r2: float
    """Share of the reward's variance that the law explains."""
    residual_last_third: float
    """Mean residual over the last third of the steps, in standard deviations of the residuals: the law's own drift."""
    residuals: tuple[tuple[int, float], ...]
    """(step, reward - law)."""


def growths(k3: Series | None, changes: Sequence[ChangePoint] = ()) -> tuple[Growth, ...]:
    """How fast the mismatch compounds, over the run and over its last third: under arXiv 2510.18855 by a constant factor.

    No line is laid across a jump: a run with one has none of its own, and its last third begins after the last jump.
    """
    if k3 is None:
        return ()
    there = k3.known & (k3.values > 0)
    steps, logs = k3.steps[there], np.log(k3.values[there])
    jumps = [change.high for change in changes if change.kind == SHIFT]
    last = max(len(steps) - len(steps) // 3, int(np.searchsorted(steps, max(jumps, default=-1), side="right")))
    parts = [("last third", steps[last:], logs[last:])]
    if not jumps:
        parts.insert(0, ("run", steps, logs))
    return tuple(_growth(part, t, y) for part, t, y in parts if len(t) >= FEWEST)


def _growth(part: str, steps: np.ndarray, logs: np.ndarray) -> Growth:
    from scipy.stats import linregress

    t = (steps - steps[0]).astype(float)  # float64 does not tell large numbers apart
    t -= t.mean()
    slope = float(linregress(t, logs).slope)
    scatter = highest_long_run_variance(logs - logs.mean() - slope * t, 2)
    reach = student_quantile(0.975, len(t) - 2) * math.sqrt(scatter / float(t @ t))
    decided = abs(slope) > reach
    return Growth(
        part=part, num_steps=len(steps), slope=slope, low=slope - reach, high=slope + reach, growth=math.expm1(slope),
        doubling=math.log(2) / slope if decided else None,
    )  # fmt: skip


def entropy_law(reward: Series | None, entropy: Series | None) -> EntropyLaw | None:
    """Fit the law by least squares; None for fewer than 8 steps with both, or an entropy that does not move."""
    from scipy.stats import linregress

    if reward is None or entropy is None:
        return None
    there = reward.known & entropy.known & (entropy.values < 500)
    if there.sum() < FEWEST:
        return None
    x, y = np.exp(entropy.values[there]), reward.values[there]
    apart = x - x.mean()
    if not float(apart @ apart) > 1e-18 * float(x @ x):
        return None
    fit, moves = linregress(x, y), bool(np.ptp(y) > 0)
    left = y - fit.intercept - fit.slope * x
    spread = float(left.std())
    last = left[len(left) - len(left) // 3 :]
    return EntropyLaw(
        num_steps=len(y), a=-float(fit.slope), b=float(fit.intercept), r2=float(fit.rvalue) ** 2 if moves else 0.0,
        residual_last_third=float(last.mean()) / spread if moves and spread > 0 else 0.0,
        residuals=tuple((int(step), float(value)) for step, value in zip(reward.steps[there], left, strict=True)),
    )  # fmt: skip
