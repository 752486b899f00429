"""Confidence intervals over groups, because sequences with the same prompt are correlated.

A group is all sequences in a step with the same `group_id`, or a single sequence without a `group_id`. For measured
coverage, see docs/evidence/intervals.md (benchmarks/coverage.py).

Shapes: N sequences, G units (each one or several groups), R resamples, C columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import lru_cache

import numpy as np

from .estimators import Array, Totals

Interval = tuple[float, float]
Statistic = Callable[[Totals], Array]

SEED = 20_260_000

MIN_GROUPS = 8
"""Minimum number of groups for an interval. With fewer, a nominal 95% Student's t interval covers the true value in
only 80% to 90% of runs if prompts differ, and a valid studentized bootstrap interval is 5 to 8 times as wide, or
infinite."""

MOST_UNITS = 256
"""Maximum number of units to resample. If there are more groups, they are merged into this many units, which leaves
the variance unchanged."""

PARTS = 20

_RESAMPLES = (1_000, 20_000)
"""Minimum and maximum number of resamples. Within these limits, the number is chosen so that about _BEYOND resamples
fall beyond each bound of the interval."""
_BEYOND = 25

_STEP = 1e-5

_NOISE = 1e-9
"""Below this relative standard error, groups differ only by rounding and count as identical."""

_NO_SPREAD = 1e-6
"""A resample counts as having no variation if its standard error is at most this share of the run's standard error."""


_BLOCK = 1 << 15


class NoInterval(StrEnum):
    FEW = f"fewer than {MIN_GROUPS} groups"
    ALIKE = "every group gives the same value"
    UNDEFINED = "the value is undefined without some of the groups"
    CARRIED = "the value depends on too few groups"
    SINGLE = "a single sequence determines the value"
    UNSEEN = "rare sequences with large weights can determine the value, and the run may contain none of them"


def ends(found: Interval | NoInterval) -> Interval | None:
    return None if isinstance(found, NoInterval) else found


def unit(table: str) -> str:
    of_sequence = f"CASE WHEN {table}.group_id IS NULL THEN {table}.seq_id END"
    return f"hash({table}.run, {table}.step, {table}.group_id, {of_sequence})"


def bootstrap(
    statistics: Mapping[str, Statistic], columns: Mapping[str, Array], unit_N: np.ndarray, confidence: float, *,
    constants: Mapping[str, float] | None = None, open_ended: bool = False,
) -> dict[str, Interval | NoInterval]:  # fmt: skip
    """Return bootstrap-t intervals over groups for statistics of totals (Efron 1981; Hall 1988).

    Each resample gives t = (resampled value - value) / (resampled standard error), where standard errors come from the
    infinitesimal jackknife (Efron 1982). The bounds are value - t * standard error at two quantiles of t. With few
    groups, the variance is underestimated, so more extreme quantiles are used (Hesterberg 2015, What Teachers Should
    Know About the Bootstrap, section 3.2, does this for percentile intervals). No bound is closer to the value than the
    bound of a Student's t interval with G - 1 degrees of freedom. scipy.stats.bootstrap supports neither groups nor
    bootstrap-t intervals.

    `constants` are passed to the statistics together with the totals, and are not resampled. A statistic with an
    infinite bound has no interval (CARRIED), unless `open_ended` is set.
    """
    groups_N, num_groups = numbered(unit_N)
    if num_groups < MIN_GROUPS:
        return dict.fromkeys(statistics, NoInterval.FEW)
    resampling = _Resampling(groups_N % MOST_UNITS, columns, confidence, constants or {})
    return {name: resampling.interval(statistic, open_ended) for name, statistic in statistics.items()}


def ratio_interval(
    values_N: Array, of_N: Array, unit_N: np.ndarray, confidence: float, *, open_ended: bool = False
) -> Interval | NoInterval:
    """Return the bootstrap-t interval for sum(values_N) / sum(of_N)."""
    columns = {"value": values_N, "of": of_N}
    statistics = {"ratio": lambda totals: totals["value"] / totals["of"]}
    return bootstrap(statistics, columns, unit_N, confidence, open_ended=open_ended)["ratio"]


def largest_interval(values_N: Array, unit_N: np.ndarray, confidence: float) -> Interval | NoInterval:
    """Return a percentile bootstrap interval over groups for the largest value (Efron 1979). The upper bound is the
    run's own maximum, although longer runs may exceed it."""
    groups_N, num_groups = numbered(unit_N)
    if num_groups < MIN_GROUPS:
        return NoInterval.FEW
    top_G = np.full(min(num_groups, MOST_UNITS), -np.inf)
    np.maximum.at(top_G, groups_N % MOST_UNITS, values_N)
    number = len(top_G)
    drawn_RG = np.random.default_rng(SEED).integers(0, number, (_RESAMPLES[0], number))
    low = np.quantile(top_G[drawn_RG].max(axis=1), (1 - confidence) / 2, method="closest_observation")
    return float(low), float(top_G.max())


def parts_of(unit_N: np.ndarray) -> np.ndarray:
    """Divide the groups at random into at most PARTS parts, without splitting a group. Return the index of each
    element's part, [N]."""
    groups_N, num_groups = numbered(unit_N)
    part_of_group = np.empty(num_groups, np.int64)
    dealt = np.arange(num_groups) % min(PARTS, num_groups)
    part_of_group[np.random.default_rng(SEED).permutation(num_groups)] = dealt
    return np.asarray(part_of_group[groups_N])


def jackknife(value: float, without_P: Array, confidence: float) -> Interval | NoInterval:
    """Return a smooth statistic's interval from its values `without_P`, each computed with one of the P parts left out,
    using Tukey's pseudo-values, P value - (P - 1) value_p. Returns SINGLE if leaving out a part rarely changes
    the value (e.g. a maximum)."""
    num_parts = len(without_P)
    if num_parts < MIN_GROUPS:
        return NoInterval.FEW
    if not math.isfinite(value) or not np.isfinite(without_P).all():
        return NoInterval.UNDEFINED
    if (without_P == value).all():
        return NoInterval.ALIKE
    if np.count_nonzero(without_P == value) > num_parts / 2:
        return NoInterval.SINGLE
    pseudo = num_parts * value - (num_parts - 1) * without_P
    found = ratio_interval(pseudo, np.ones(len(pseudo)), np.arange(len(pseudo)), confidence)
    if isinstance(found, NoInterval):
        return found
    bias = float(pseudo.mean()) - value
    return found[0] - bias, found[1] - bias


def student_quantile(probability: float, freedom: int) -> float:
    """Return a quantile from Student's t-distribution.

    >>> round(student_quantile(0.975, 1), 3)
    12.706
    """
    from scipy.special import stdtrit  # the same as scipy.stats.t.ppf, but faster to import

    return float(stdtrit(freedom, probability))


def f_quantile(probability: float, numerator: int, denominator: int) -> float:
    """Return a quantile from Fisher's F-distribution.

    >>> round(f_quantile(0.90, 1, 6), 2)
    3.78
    """
    from scipy.special import fdtri  # scipy.stats is slow to import

    return float(fdtri(numerator, denominator, probability))


def numbered(unit_N: np.ndarray) -> tuple[np.ndarray, int]:
    _, first, place_N = np.unique(unit_N, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[place_N.reshape(-1)], len(first)


class _Resampling:
    def __init__(
        self, units_N: np.ndarray, columns: Mapping[str, Array], confidence: float, constants: Mapping[str, float]
    ):
        self._units_N, self._columns, self._constants = units_N, columns, constants
        self._totals = {name: np.asarray(values.sum()) for name, values in columns.items()}
        self._number = number = int(units_N.max()) + 1
        self._student = student_quantile((1 + confidence) / 2, number - 1)
        self._level = _expanded(self._student, number)
        least, most = _RESAMPLES
        num_resamples = int(min(max(least, math.ceil(_BEYOND / self._level)), most))
        self._counts_RG = _draws(number, num_resamples)
        self._by_unit: dict[str, tuple[float, float, Array, Array]] = {}

    def interval(self, statistic: Statistic, open_ended: bool) -> Interval | NoInterval:
        names = self._read_by(statistic)
        if not names:
            return NoInterval.ALIKE
        with np.errstate(all="ignore"):
            scale_C, total_C, off_CG, resampled_RC = (
                np.stack([self._column(name)[part] for name in names], axis=-1 if part == 3 else 0) for part in range(4)
            )
            (value,) = self._values(statistic, names, total_C[None])
            values_R = self._values(statistic, names, resampled_RC)
            slopes_RC = self._slopes(statistic, names, total_C[None], scale_C)
            (error,) = self._errors(slopes_RC, off_CG, np.ones((1, self._number)))
            parts = np.sqrt(np.sum((slopes_RC.T * off_CG) ** 2))
            errors_R = self._errors(self._slopes(statistic, names, resampled_RC, scale_C), off_CG, self._counts_RG)
        if not all(np.isfinite(found).all() for found in (value, error, values_R, errors_R)):
            return NoInterval.UNDEFINED
        if error <= _NOISE * parts:
            return NoInterval.ALIKE
        off_R = values_R - value
        alike_R = errors_R <= _NO_SPREAD * error
        t_R = off_R / np.where(alike_R, 1.0, errors_R)
        t_R[alike_R] = np.where(off_R == 0, 0.0, np.copysign(np.inf, off_R))[alike_R]
        below, above = np.quantile(t_R, [self._level, 1 - self._level], method="closest_observation")
        low, high = value - max(above, self._student) * error, value + max(-below, self._student) * error
        return (float(low), float(high)) if open_ended or math.isfinite(high - low) else NoInterval.CARRIED

    def _read_by(self, statistic: Statistic) -> list[str]:
        seen = _Seen(self._totals | self._fixed(()))
        with np.errstate(all="ignore"):
            statistic(seen)
        return [name for name in self._columns if name in seen]

    def _column(self, name: str) -> tuple[float, float, Array, Array]:
        if name not in self._by_unit:
            by_unit_G = np.bincount(self._units_N, self._columns[name], minlength=self._number)
            total, scale = float(by_unit_G.sum()), float(np.sqrt(np.sum(by_unit_G**2)))
            off_G = np.asarray(by_unit_G - total / self._number, np.float64)
            # Use einsum, not BLAS: on busy cores, waiting for BLAS threads takes fifty times as long as computing.
            resampled_R = np.asarray(total + np.einsum("rg,g->r", self._counts_RG, off_G), np.float64)
            self._by_unit[name] = max(abs(total), scale), total, off_G, resampled_R
        return self._by_unit[name]

    def _fixed(self, shape: tuple[int, ...]) -> dict[str, Array]:
        return {name: np.full(shape, value) for name, value in self._constants.items()}

    def _values(self, statistic: Statistic, names: list[str], totals_RC: Array) -> Array:
        totals = {name: totals_RC[:, place] for place, name in enumerate(names)} | self._fixed((len(totals_RC),))
        return np.asarray(statistic(totals), np.float64)

    def _slopes(self, statistic: Statistic, names: list[str], totals_RC: Array, scale_C: Array) -> Array:
        slopes_RC = np.zeros_like(totals_RC)
        for place, scale in enumerate(scale_C):
            if scale > 0:
                moved = [totals_RC.copy(), totals_RC.copy()]
                for sign, totals in zip((1, -1), moved, strict=True):
                    totals[:, place] += sign * _STEP * scale
                up, down = (self._values(statistic, names, totals) for totals in moved)
                slopes_RC[:, place] = (up - down) / (2 * _STEP * scale)
        return slopes_RC

    def _errors(self, slopes_RC: Array, off_CG: Array, counts_RG: Array) -> Array:
        squares_R = np.empty(len(slopes_RC))
        at_once = max(1, _BLOCK // self._number)
        for first in range(0, len(slopes_RC), at_once):
            rows = slice(first, first + at_once)
            influence_RG = np.einsum("rc,cg->rg", slopes_RC[rows], off_CG)
            total_R = np.einsum("rg,rg->r", counts_RG[rows], influence_RG)
            influence_RG *= influence_RG
            squares_R[rows] = np.einsum("rg,rg->r", counts_RG[rows], influence_RG) - total_R**2 / self._number
        return np.asarray(np.sqrt(np.maximum(squares_R, 0.0) * self._number / (self._number - 1)))


class _Seen(dict[str, Array]):
    """The totals that a statistic has read."""

    def __init__(self, totals: Totals):
        self._totals = totals

    def __missing__(self, name: str) -> Array:
        return self.setdefault(name, self._totals[name])


@lru_cache(maxsize=4)
def _draws(number: int, num_resamples: int) -> Array:
    drawn_RG = np.random.default_rng(SEED).integers(0, number, (num_resamples, number))
    drawn_RG += np.arange(num_resamples)[:, None] * number
    counts = np.bincount(drawn_RG.reshape(-1), minlength=num_resamples * number)
    return np.asarray(counts.reshape(num_resamples, number), np.float64)


def _expanded(student: float, number: int) -> float:
    from scipy.special import ndtr

    return float(ndtr(-math.sqrt(number / (number - 1)) * student))
