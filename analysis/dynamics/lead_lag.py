"""Which series goes ahead of which: correlations of step-to-step changes over lags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from ..statistics.correlations import leading_lag
from .quantities import Series

NAMES = (
    "k3", "grad_norm", "reward", "reward_std_within_groups", "length", "entropy", "clip_share", "policy_lag",
    "update_to_weight", "changed_weights",
)  # fmt: skip
"""Series that are compared: one of those that say the same."""

FEWEST = 24
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
    if n < FEWEST:
        return None
    led = leading_lag(a.scaled[both], b.scaled[both], min(LARGEST_LAG, n // 4))
    if led is None:
        return None
    lag, correlation, p = led
    return lag * int(np.median(np.diff(a.steps[both]))), correlation, p, n
