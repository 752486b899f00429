"""Laws that series are tested against: growth of the mismatch, reward against entropy, and which series lead others."""

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


NAMES = (
    "k3", "grad_norm", "reward", "reward_std_within_groups", "length", "entropy", "clip_share", "policy_lag",
    "update_to_weight", "changed_weights",
)  # fmt: skip
"""Series that are compared: one of those that say the same."""

FEWEST_FOR_LAGS = 24
"""Steps that both must have."""

LARGEST_LAG = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class LeadLag:
    """Two series, and the lag at which their changes agree most."""

    leader: str
    """The one that goes ahead; the first of both where the lag is 0."""
    follower: str
    lag: int
    """Steps by which it is ahead."""
    correlation: float
    """Of the ranks of their step-to-step changes, at that lag."""
    p: float
    """Chance of a correlation as strong at any lag if the two had nothing to do with each other."""
    q: float
    """The same for the number of pairs compared: the share of false ones among pairs with q at most this."""
    num_steps: int


def lead_lags(series: Mapping[str, Series]) -> tuple[LeadLag, ...]:
    """Compare every two series of NAMES, the surest first.

    Each series is differenced on its scale and turned into ranks; correlations are over lags of up to 50 steps, a quarter
    of the steps at most. The null is a moving-block bootstrap of one of the two, which keeps each series' own
    autocorrelation and breaks what joins them; p is of the largest correlation over all lags, q after Benjamini and
    Hochberg. Of one run this describes and proves no cause.
    """
    found = []
    for first, second in combinations([name for name in NAMES if name in series], 2):
        one = _compared(series[first], series[second])
        if one is not None:
            found.append((first, second, *one))
    if not found:
        return ()
    from scipy.stats import false_discovery_control  # which takes half a second to import

    adjusted = false_discovery_control([p for *_, p, _ in found], method="bh")
    rows = [_row(*one, float(q)) for one, q in zip(found, adjusted, strict=True)]
    return tuple(sorted(rows, key=lambda row: (row.q, row.p, -abs(row.correlation), row.leader, row.follower)))


def _row(first: str, second: str, lag: int, correlation: float, p: float, num_steps: int, q: float) -> LeadLag:
    leader, follower = (first, second) if lag >= 0 else (second, first)
    return LeadLag(
        leader=leader, follower=follower, lag=abs(lag), correlation=correlation, p=p, q=q, num_steps=num_steps
    )


def _compared(a: Series, b: Series) -> tuple[int, float, float, int] | None:
    """Lag in steps (above 0: a is ahead), correlation, p and the number of steps; None where it cannot be said."""
    both = a.known & b.known
    n = int(both.sum())
    if n < FEWEST_FOR_LAGS:
        return None
    led = leading_lag(a.scaled[both], b.scaled[both], min(LARGEST_LAG, n // 4))
    if led is None:
        return None
    lag, correlation, p = led
    return lag * int(np.median(np.diff(a.steps[both]))), correlation, p, n
