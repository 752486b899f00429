"""Fit laws to series: growth of the mismatch, reward as a function of entropy, and leads and lags between series."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from ..facts.changes import ChangePoint
from ..facts.series import Series
from ..statistics.correlations import leading_lag
from ..statistics.intervals import student_quantile
from ..statistics.location import SHIFT
from ..statistics.noise import highest_long_run_variance

FEWEST = 8
"""Minimum number of steps for fitting a line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Growth rate of k3: a line fitted to ln k3 over the steps."""

    part: str
    """Part of the run that was fitted: `run` or `last third`."""
    num_steps: int
    slope: float
    """Slope of ln k3, per step."""
    low: float
    high: float
    """`low` to `high` is the 95 % interval of the slope, which allows for autocorrelation; see
    docs/evidence/intervals.md."""
    growth: float
    """Relative growth per step: exp(slope) - 1."""
    doubling: float | None
    """Number of steps in which k3 doubles, or, if negative, halves; None if the interval of the slope contains 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EntropyLaw:
    """Fit of R = -a exp(H) + b to the steps of a run: reward as a function of entropy (arXiv 2505.22617)."""

    num_steps: int
    a: float
    b: float
    """The law predicts a reward of b - a at zero entropy."""
    r2: float
    """Share of the variance in the reward that the law explains."""
    residual_last_third: float
    """Mean residual over the last third of the steps, in standard deviations of the residuals: drift away from the
    law."""
    residuals: tuple[tuple[int, float], ...]
    """(step, residual) pairs."""


def growths(k3: Series | None, changes: Sequence[ChangePoint] = ()) -> tuple[Growth, ...]:
    """Return the growth of the mismatch over the run and over its last third; arXiv 2510.18855 predicts a constant
    factor.

    No line is fitted across a jump: with one, only the last third is fitted, and only from the last jump on.
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

    t = (steps - steps[0]).astype(float)  # subtract first: large integers lose precision in float64
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
    """Fit the law by least squares; None with fewer than 8 steps of both series, or with a constant entropy."""
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


NAMES = (
    "k3", "grad_norm", "reward", "reward_std_within_groups", "length", "entropy", "clip_share", "policy_lag",
    "update_to_weight", "changed_weights",
)  # fmt: skip
"""Names of the series compared for leads and lags: one per group of equivalent series."""

FEWEST_FOR_LAGS = 24
"""Minimum number of steps at which both series have a value."""

LARGEST_LAG = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class LeadLag:
    """The lag at which the changes of two series correlate most."""

    leader: str
    """Name of the series that changes first; if the lag is 0, either."""
    follower: str
    lag: int
    """Number of steps by which the leader is ahead."""
    correlation: float
    """Rank correlation between the step-to-step changes of the two series at this lag."""
    p: float
    """p-value: probability of a correlation as strong at any lag if the two are independent."""
    q: float
    """p adjusted for the number of pairs: expected share of false positives among pairs with this q or less."""
    num_steps: int


def lead_lags(series: Mapping[str, Series]) -> tuple[LeadLag, ...]:
    """Correlate every pair of series of NAMES over lags, the most significant first.

    Each series is differenced on its scale and ranked; lags go up to 50 steps and at most a quarter of the steps. The
    null distribution is a moving-block bootstrap of one series, which keeps its autocorrelation and removes the
    dependence. p is for the largest correlation over all lags; q is adjusted after Benjamini and Hochberg. Correlation
    within one run does not show causation.
    """
    found = []
    for first, second in combinations([name for name in NAMES if name in series], 2):
        one = _compared(series[first], series[second])
        if one is not None:
            found.append((first, second, *one))
    if not found:
        return ()
    from scipy.stats import false_discovery_control  # takes half a second to import

    adjusted = false_discovery_control([p for *_, p, _ in found], method="bh")
    rows = [_row(*one, float(q)) for one, q in zip(found, adjusted, strict=True)]
    return tuple(sorted(rows, key=lambda row: (row.q, row.p, -abs(row.correlation), row.leader, row.follower)))


def _row(first: str, second: str, lag: int, correlation: float, p: float, num_steps: int, q: float) -> LeadLag:
    leader, follower = (first, second) if lag >= 0 else (second, first)
    return LeadLag(
        leader=leader, follower=follower, lag=abs(lag), correlation=correlation, p=p, q=q, num_steps=num_steps
    )


def _compared(a: Series, b: Series) -> tuple[int, float, float, int] | None:
    """Return the lag in steps (positive: a is ahead), correlation, p and number of steps; None if undefined."""
    both = a.known & b.known
    n = int(both.sum())
    if n < FEWEST_FOR_LAGS:
        return None
    led = leading_lag(a.scaled[both], b.scaled[both], min(LARGEST_LAG, n // 4))
    if led is None:
        return None
    lag, correlation, p = led
    return lag * int(np.median(np.diff(a.steps[both]))), correlation, p, n
