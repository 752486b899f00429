"""The mismatch of a run over its steps: its size at the onset of a fall, when it begins, and whether it grows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ..dynamics.fall import Fall
from ..dynamics.series import Series
from . import thresholds as t

FROM_START, FROM_UPDATES, LATER = "from the start", "with the first updates", "later"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMismatch:
    """The mismatch of a run."""

    size: float
    """Mean |d| where the fall begins, nats: the median over the tenth of the run before it, or the largest median of three
    steps until a good part of it was lost."""
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
    before = _before(steps, fall)
    onset = before
    if fall is not None:
        first, last = fall.interval
        onset = (steps >= min(first, fall.low)) & (steps <= max(last, fall.high, fall.fallen))
    n = len(values)
    return RunMismatch(
        size=max(float(np.median(values[before])), _largest(values[onset]) if fall else 0.0),
        first=float(values[0]),
        settled=float(np.median(values[n // 10 : max(n // 2, n // 10 + 1)])),
        late=float(np.median(values[-max(n // 4, 1) :])),
    )


def _largest(values: np.ndarray) -> float:
    """The largest median of three neighbours: one outlier does not count."""
    if len(values) < 3:
        return float(np.median(values)) if len(values) else 0.0
    return float(np.median(np.lib.stride_tricks.sliding_window_view(values, 3), axis=-1).max())


def _before(steps: np.ndarray, fall: Fall | None) -> np.ndarray:
    """[n] bool: the tenth of the run before a fall, at least its first steps; the whole run without one."""
    if fall is None:
        return np.ones(len(steps), bool)
    width = max(len(steps) // 10, 3)
    end = max(int(np.searchsorted(steps, fall.step, side="right")), width)
    is_before = np.zeros(len(steps), bool)
    is_before[max(end - width, 0) : end] = True
    return is_before
