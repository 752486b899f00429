"""Result of `dynamics`, with the growth rate of the mismatch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...schemas.results import Result
from ..facts.changes import ChangePoint, FirstChange
from ..facts.fall import Fall
from ..facts.series import Series
from ..statement import Statement
from ..statistics.intervals import student_quantile
from ..statistics.location import SHIFT
from ..statistics.noise import highest_long_run_variance

FEWEST_FOR_GROWTH = 8
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


def growths(k3: Series | None, changes: Sequence[ChangePoint] = ()) -> tuple[Growth, ...]:
    """Return the growth of the mismatch over the run and over its last third; arXiv 2510.18855 predicts a constant
    factor.

    No line is fitted across a jump: if there is one, only the part of the last third after the last jump is fitted.
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
    return tuple(_growth(part, t, y) for part, t, y in parts if len(t) >= FEWEST_FOR_GROWTH)


def _growth(part: str, steps: np.ndarray, logs: np.ndarray) -> Growth:
    t = (steps - steps[0]).astype(float)  # subtract first: large integers lose precision in float64
    t -= t.mean()
    variance, covariance = np.cov(t, logs, bias=True)[0]
    slope = float(covariance / variance)
    scatter = highest_long_run_variance(logs - logs.mean() - slope * t, 2)
    reach = student_quantile(0.975, len(t) - 2) * math.sqrt(scatter / float(t @ t))
    decided = abs(slope) > reach
    return Growth(
        part=part, num_steps=len(steps), slope=slope, low=slope - reach, high=slope + reach, growth=math.expm1(slope),
        doubling=math.log(2) / slope if decided else None,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesSummary:
    """Summary of one series: start, end and changes."""

    name: str
    kind: str
    scale: str
    source: str
    num_steps: int
    """Number of steps with a value."""
    first: float
    """Median of the first tenth of the steps, at least five."""
    last: float
    """Median of the last tenth of the steps, at least five."""
    smallest: float
    largest: float
    not_finite: tuple[int, ...]
    """Steps at which the value is NaN or infinite."""
    changes: tuple[ChangePoint, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dynamics(Result):
    """Changes of a run's series, and their order."""

    _text = "tim_trace.analysis.dynamics.text:dynamics_text"

    trace: str
    run: str
    pair: str
    first_step: int
    last_step: int
    num_steps: int
    summary_codes: tuple[Statement, ...]
    """Summary of the run, as codes in text.SUMMARY."""
    fall: Fall | None
    """Collapse of the run's outcome as found by `attribute`; None without one, or if `steps` restricts the run."""
    series: tuple[SeriesSummary, ...]
    onsets: tuple[FirstChange, ...]
    """First change of each series, earliest first."""
    growth: tuple[Growth, ...]
    """Growth rates of k3."""
    unanswered_codes: tuple[Statement, ...]
    """Questions that the trace cannot answer, as codes in text.UNANSWERED."""
