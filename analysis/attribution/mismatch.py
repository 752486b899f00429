"""The mismatch of a run over its steps: its size at the onset of a fall, when it begins, and whether it grows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ..dynamics.fall import Fall
from ..dynamics.series import Series
from . import thresholds as t

_WIDTH = 3
"""Steps of which the median is taken: one outlier does not count."""
FROM_START, FROM_UPDATES, LATER = "from the start", "with the first updates", "later"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMismatch:
    """The mismatch of a run."""

    size: float
    """Mean |d| where the fall begins, nats: the median over the tenth of the run before it, or the largest median of three
    successive steps of which the first comes no later than the loss of a good part."""
    first: float
    """Mean |d| of the first step, nats: of weights that no update has seen, where the run was recorded from its start."""
    settled: float
    """Median of mean |d| over the second tenth of the run up to its half."""
    late: float
    """Median over the last quarter."""

    @property
    def begins(self) -> str:
        """`from the start`, `with the first updates` (weights that are alike at first drift apart), or `later`."""
        reference = max(self.settled, self.size)
        if self.first > t.AT_ONCE * reference:
            return FROM_START
        return FROM_UPDATES if self.settled > t.AT_ONCE * self.size else LATER

    @property
    def grows(self) -> bool:
        """Whether it keeps growing after it began."""
        return self.late > t.GROWTH * self.settled


def read_run_mismatch(series: Mapping[str, Series], fall: Fall | None) -> RunMismatch | None:
    """The mismatch up to the onset of a fall; None where no two passes were recorded."""
    mean_abs_d = series.get("mean_abs_d")
    if mean_abs_d is None or not mean_abs_d.known.any():
        return None
    steps, values = mean_abs_d.steps[mean_abs_d.known], mean_abs_d.values[mean_abs_d.known]
    size = float(np.median(values[_before(steps, fall)]))
    if fall is not None:
        size = max(
            size,
            _largest(steps, values, min(fall.interval[0], fall.low), max(fall.interval[1], fall.high, fall.fallen)),
        )
    n = len(values)
    return RunMismatch(
        size=size,
        first=float(values[0]),
        settled=float(np.median(values[n // 10 : max(n // 2, n // 10 + 1)])),
        late=float(np.median(values[-max(n // 4, 1) :])),
    )


def _largest(steps: np.ndarray, values: np.ndarray, first: int, last: int) -> float:
    """The largest median of three successive steps that begin from `first` to `last`, but at most the largest value there.

    So a single outlier does not count, a jump at `last` counts, and a jump after it does not.
    """
    within = values[(steps >= first) & (steps <= last)]
    around = values[(steps >= first) & (steps <= last + _WIDTH - 1)]
    if not len(within) or len(around) < _WIDTH:
        return float(np.median(within)) if len(within) else 0.0
    medians = np.median(np.lib.stride_tricks.sliding_window_view(around, _WIDTH), axis=-1)
    return min(float(medians.max()), float(within.max()))


def _before(steps: np.ndarray, fall: Fall | None) -> np.ndarray:
    """[n] bool: the tenth of the run before a fall, at least its first steps; the whole run without one."""
    if fall is None:
        return np.ones(len(steps), bool)
    width = max(len(steps) // 10, 3)
    end = max(int(np.searchsorted(steps, fall.step, side="right")), width)
    is_before = np.zeros(len(steps), bool)
    is_before[max(end - width, 0) : end] = True
    return is_before
