"""Find the step from which the series of two runs differ beyond noise.

Shapes: n steps with a value in both runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise

import numpy as np

from ..facts.changes import FEWEST as FEWEST_CHANGES
from ..facts.changes import change_points
from ..facts.series import LINEAR, Series
from ..statistics.noise import half_square_difference, highest_long_run_variance, tamed
from .comparison import RunDifference

FEWEST = 3
"""Minimum number of steps for estimating the noise in the difference between two series."""
BEYOND_SD = 4.5
"""Number of standard errors by which the mean difference must exceed 0 for two series to count as different. The first
step is chosen to maximise the difference, which the threshold allows for: the false-positive rate is below 0.5 %."""

LAGS = ("policy_lag", "version_lag")
"""Names of series that count updates and therefore have no noise: any difference is reported."""


def series_differences(
    a: Mapping[str, Series], b: Mapping[str, Series], same: list[str], within: list[str]
) -> Iterator[RunDifference]:
    """Yield the series that differ. Names of bitwise-equal series are added to `same`, names of series that differ only
    by noise to `within`."""
    for name in a:
        if name not in b:
            continue
        yield from _not_finite(a[name], b[name])
        one, two = _on_shared_steps(a[name], b[name])
        unequal = one.values != two.values
        if not unequal.any():
            same.append(name)
            continue
        first = int(np.argmax(unequal))
        found = _lag(one, two, first) if name in LAGS else _apart(one, two, first)
        if found is None:
            within.append(name)
        else:
            yield found


def _on_shared_steps(a: Series, b: Series) -> tuple[Series, Series]:
    steps = np.intersect1d(a.steps[a.known], b.steps[b.known])
    one, two = (replace(run, steps=steps, values=run.values[np.searchsorted(run.steps, steps)]) for run in (a, b))
    return one, two


def _not_finite(a: Series, b: Series) -> Iterator[RunDifference]:
    """Yield a difference if a step recorded in both runs has NaN or infinity in only one of them; the first such step
    is reported."""
    shared = np.intersect1d(a.steps, b.steps)
    alone = np.intersect1d(np.setxor1d(a.not_finite, b.not_finite), shared)
    if len(alone):
        step = int(alone[0])
        one, two = (float(run.values[np.searchsorted(run.steps, step)]) for run in (a, b))
        yield RunDifference(kind="series", name=a.name, step=step, a=one, b=two, values={"num_steps": len(alone)})


def _lag(a: Series, b: Series, first: int) -> RunDifference:
    return RunDifference(
        kind="lag", name=a.name, step=int(a.steps[first]), a=float(a.values[first]), b=float(b.values[first])
    )


def _apart(a: Series, b: Series, first: int) -> RunDifference | None:
    """Return the first segment, starting from index `first`, in which the mean difference is significant; None if there
    is none."""
    joint = replace(a, values=np.concatenate([a.values, b.values])).scaled
    gap_n, steps = (joint[: len(a.steps)] - joint[len(a.steps) :])[first:], a.steps[first:]
    difference = Series(a.name, steps, gap_n, LINEAR, a.kind)
    cuts = [int(np.searchsorted(steps, change.step)) for change in change_points(difference)]
    for low, end in pairwise([0, *cuts, len(steps)]):
        start = low + _onset(gap_n[low:end])
        if end - start >= FEWEST and (size := _beyond(gap_n[start:end], gap_n[low:end])) is not None:
            inside = slice(first + start, first + end)
            return RunDifference(
                kind="series", name=a.name, step=int(steps[start]), a=float(np.median(a.values[inside])),
                b=float(np.median(b.values[inside])), size_in_sd=None if math.isinf(size) else size,
                values={"num_steps": end - start},
            )  # fmt: skip
    return None


def _onset(gap_n: np.ndarray) -> int:
    """Return the index at which a non-zero level begins, by a least-squares fit of 0 before the index and a constant
    from it on."""
    from_here = np.cumsum(gap_n[::-1])[::-1]
    return int(np.argmax(from_here**2 / np.arange(len(gap_n), 0, -1))) if len(gap_n) else 0


def _beyond(apart_n: np.ndarray, stretch_n: np.ndarray) -> float | None:
    """Return the mean difference in standard deviations of a single step's difference; infinity without noise; None if
    not significant.

    The noise is that of the whole segment, or of `apart_n` if the segment is short. The mean of few steps follows
    Student's distribution, whose quantile is approximated from the normal z by sqrt(df (exp(z^2 / df) - 1)) (Wallace,
    Annals of Mathematical Statistics 30, 1959).
    """
    mean = abs(float(apart_n.mean()))
    is_short = len(stretch_n) < FEWEST_CHANGES
    known = apart_n if is_short else tamed(stretch_n)
    if is_short:
        deviation = float(np.std(known, ddof=1))
    else:
        before = len(known) - len(apart_n)
        left = np.concatenate([known[:before], known[before:] - known[before:].mean()])
        deviation = math.sqrt(highest_long_run_variance(left, 2))
    df = len(known) - 1
    bound = math.sqrt(df * math.expm1(min(BEYOND_SD**2 / df, 700.0)))
    if mean <= max(bound * deviation / math.sqrt(len(apart_n)), 1e-12 * float(np.abs(stretch_n).max())):
        return None
    scatter = math.sqrt(half_square_difference(known, 1))
    return mean / scatter if scatter > 1e-9 * mean else math.inf
