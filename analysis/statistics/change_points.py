"""A series cut into stretches that are straight lines: the exact cut of least cost.

ruptures' Pelt finds the same cuts of 60 to 1,000 steps and takes 7 (60 steps) to 70 times (1,000) as long.

Shapes: n values, one a step, without gaps.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise

import numpy as np

from .noise import half_square_difference, long_run_variance, without_line

SIGNIFICANT = 0.003
"""Chance that noise alone gives a cut, where its variance is known; estimating it brings the chance below 0.01."""

_ROUNDS = 4


def shortest(n: int) -> int:
    """Fewest steps of a stretch: 4, and a fiftieth of long series."""
    return max(4, math.ceil(0.02 * n))


def tail(gain: float, n: int) -> float:
    """An upper bound of the chance that noise makes one line broken in two better by `gain` long-run variances.

    0.58 ln(n) gain exp(-gain / 2): the form of a largest chi-square of 2 degrees of freedom over all places, the factor
    such that it holds for white noise of 20 to 1,000 steps, by simulation.
    """
    return min(1.0, 0.58 * math.log(n) * gain * math.exp(-gain / 2)) if gain > 2 else 1.0


@lru_cache
def penalty(n: int) -> float:
    """Gain that a cut must bring, in long-run variances: that of chance SIGNIFICANT, and no less than 3 ln n."""
    gain = 3.0 * math.log(n)
    while tail(gain, n) > SIGNIFICANT:
        gain += 0.1
    return gain


class StretchSquares:
    """Residual sums of squares of straight lines through any stretch of a series, from running sums."""

    def __init__(self, values: np.ndarray):
        self.n = len(values)
        centred = values - values.mean()
        self._first = -(self.n - 1) / 2
        t = self._first + np.arange(self.n)
        self._sums = [np.concatenate([[0.0], np.cumsum(each)]) for each in (centred, t * centred, centred * centred)]

    def squares(self, start: np.ndarray | int, end: np.ndarray | int) -> np.ndarray:
        """Of the stretches [start, end), of at least two values each."""
        length = np.asarray(end - start, float)
        y, ty, yy = (sums[end] - sums[start] for sums in self._sums)
        middle = self._first + (np.asarray(start) + end - 1) / 2
        slope = ty - middle * y
        return np.asarray(np.maximum(yy - y * y / length - slope * slope / (length * (length * length - 1) / 12), 0.0))


def cut(values: np.ndarray) -> tuple[list[int], float]:
    """Cut a series: the first place of every stretch but the first, and the long-run variance that decided.

    The variance is estimated after the best single cut, and then after the cuts found, until they stay; with one cut
    taken out it comes out too small for a series that has none, which `_margin` makes up for.
    """
    n, least = len(values), shortest(len(values))
    if n < 3 * least:
        return [], 0.0
    lines = StretchSquares(values)
    extent = float(np.ptp(values))
    if extent <= 1e-12 * float(np.abs(values).max()):
        return [], 0.0
    # What neighbours differ by is the least that a series scatters, however many cuts explain the rest.
    floor = max((0.01 * extent) ** 2, half_square_difference(values, 1))
    whole, places, found = long_run_variance(values, 2), [_best_single(lines, least)], [-1]
    variance = whole
    for _ in range(_ROUNDS):
        left = residuals(values, places)
        variance = max(floor, min(whole, _margin(n) * long_run_variance(left, 2 * len(places) + 2)))
        cuts = _cheapest(lines, variance, least)
        if not cuts or cuts == found:
            return cuts, variance
        places = found = cuts
    return found, variance


def residuals(values: np.ndarray, places: list[int]) -> np.ndarray:
    """What is left of each stretch after its line."""
    ends = [0, *places, len(values)]
    return np.concatenate([without_line(values[a:b]) for a, b in pairwise(ends)])


def _margin(n: int) -> float:
    return 1.5 + 70.0 / n


def _best_single(lines: StretchSquares, least: int) -> int:
    places = np.arange(least, lines.n - least + 1)
    return int(places[np.argmin(lines.squares(0, places) + lines.squares(places, lines.n))])


def _cheapest(lines: StretchSquares, variance: float, least: int) -> list[int]:
    """The cuts that minimise squares / variance + penalty * cuts, by dynamic programming over the last cut."""
    n, price = lines.n, penalty(lines.n)
    cost = np.full(n + 1, np.inf)
    cost[0] = -price
    before = np.zeros(n + 1, np.int64)
    for end in range(least, n + 1):
        starts = np.arange(0, end - least + 1)
        costs = cost[starts] + lines.squares(starts, end) / variance + price
        before[end] = np.argmin(costs)
        cost[end] = costs[before[end]]
    places, end = [], n
    while end > 0:
        end = int(before[end])
        places.append(end)
    return places[::-1][1:]
