"""Which series goes ahead of which: correlations of step-to-step changes over lags.

Shapes: n steps that both series have, L lags, R resamples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from .quantities import Series

NAMES = (
    "k3", "grad_norm", "reward", "reward_std_within_groups", "length", "entropy", "clip_share", "policy_lag",
    "update_to_weight", "changed_weights",
)  # fmt: skip
"""Series that are compared: one of those that say the same."""

FEWEST = 24
"""Steps that both must have."""

LARGEST_LAG = 50
RESAMPLES = 400
SEED = 0


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
    adjusted = _adjusted([p for *_, p, _ in found])
    rows = [_row(*one, q) for one, q in zip(found, adjusted, strict=True)]
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
    x, y = _ranked(a.scaled[both]), _ranked(b.scaled[both])
    if x is None or y is None:
        return None
    reach = min(LARGEST_LAG, n // 4)
    lags = np.arange(-reach, reach + 1)
    own = _correlations(x, y[None], reach)[0]
    best = int(np.argmax(np.abs(own)))
    null = np.abs(_correlations(x, _resampled(y), reach)).max(axis=1)
    p = (1 + int((null >= abs(own[best])).sum())) / (1 + len(null))
    spacing = int(np.median(np.diff(a.steps[both])))
    return int(lags[best]) * spacing, float(own[best]), p, n


def _ranked(values: np.ndarray) -> np.ndarray | None:
    """Ranks of the changes, of mean 0 and length 1; None where nothing changes."""
    changes = np.diff(values)
    _, place, counts = np.unique(changes, return_inverse=True, return_counts=True)
    middle = np.cumsum(counts) - (counts - 1) / 2
    ranks = middle[place] - middle[place].mean()
    length = float(np.sqrt(ranks @ ranks))
    return ranks / length if length > 0 else None


def _correlations(x: np.ndarray, y: np.ndarray, reach: int) -> np.ndarray:
    """[R, L] sum over t of x_t y_{t + lag}, for lags from -reach to reach."""
    size = 1 << (2 * len(x) - 1).bit_length()
    product = np.conj(np.fft.rfft(x, size)) * np.fft.rfft(y, size, axis=-1)
    whole = np.fft.irfft(product, size, axis=-1)
    return np.asarray(np.concatenate([whole[:, size - reach :], whole[:, : reach + 1]], axis=1))


def _resampled(values: np.ndarray) -> np.ndarray:
    """[R, n] series of blocks of the given one, each of mean 0 and length 1."""
    n = len(values)
    length = min(n, max(5, math.ceil(2 * n ** (1 / 3))))
    draw = np.random.default_rng(SEED)
    starts = draw.integers(0, n - length + 1, (RESAMPLES, -(-n // length)))
    blocks = values[(starts[:, :, None] + np.arange(length)).reshape(RESAMPLES, -1)[:, :n]]
    blocks = blocks - blocks.mean(axis=1, keepdims=True)
    return np.asarray(blocks / np.maximum(np.sqrt((blocks * blocks).sum(axis=1, keepdims=True)), 1e-300))


def _adjusted(p: list[float]) -> list[float]:
    """Benjamini and Hochberg, J. R. Stat. Soc. B 57, 1995."""
    order = np.argsort(p, kind="stable")
    scaled = np.array(p)[order] * len(p) / np.arange(1, len(p) + 1) if p else np.empty(0)
    q = np.empty(len(p))
    q[order] = np.minimum(np.minimum.accumulate(scaled[::-1])[::-1], 1.0)
    return [float(value) for value in q]
