"""How far the sampling weights were behind, as the trace declares."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...facts import thresholds as ft
from .. import thresholds as t
from ..run_facts import Facts
from .timing import AFTER, largest_rise, order


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredLag:
    """Updates between the weights that scored a sequence and those that sampled it; 0 where unknown."""

    at_fall: float
    """The largest median of a tenth of the run where the fall may begin; anywhere without a fall."""
    usual: float
    """The median before that, with which the run learned; until a good part was lost, where the interval of the onset leaves less
    than a tenth of the run before it; of all steps without a fall."""

    @property
    def grew(self) -> bool:
        """Whether it was less while the run learned: a constant lag is how asynchronous training is meant to run."""
        return _grew(self.usual, self.at_fall)


def declared_lag(facts: Facts) -> DeclaredLag:
    """How far the sampling weights were behind before a fall and where it begins."""
    values = np.abs(facts.values("version_lag"))
    known = np.isfinite(values)
    if not known.any():
        return DeclaredLag(at_fall=0.0, usual=0.0)
    steps, values = facts.steps[known], values[known]
    if facts.fall is None:
        first, last = steps[0], steps[-1]
    else:
        first, last = facts.fall.interval[0] - ft.AHEAD, facts.fall.latest
    learned = steps < first if (steps < first).mean() >= t.LEARNED else steps <= last
    at = (steps >= first) & (steps <= last)
    at_fall, usual = values[at] if at.any() else values, values[learned] if learned.any() else values
    width = min(max(len(values) // 10, 3), len(at_fall))
    medians = np.median(np.lib.stride_tricks.sliding_window_view(at_fall, width), axis=-1)
    return DeclaredLag(at_fall=float(medians.max()), usual=float(np.median(usual)))


def is_grown_beside_lag(facts: Facts, lag: DeclaredLag) -> bool:
    """Whether the mismatch became a multiple before or with the fall, while the lag stayed what it was: it is not the lag's."""
    largest = largest_rise(facts)
    if largest is None or lag.grew or order(facts, largest) == AFTER:
        return False
    values, width = np.abs(facts.values("version_lag")), max(len(facts.steps) // 10, 3)
    before = values[(facts.steps < largest.low) & (facts.steps >= largest.low - width)]
    since = values[(facts.steps > largest.high) & (facts.steps <= largest.high + width)]
    before, since = before[np.isfinite(before)], since[np.isfinite(since)]
    return bool(len(before) and len(since)) and not _grew(float(np.median(before)), float(np.median(since)))


def _grew(before: float, after: float) -> bool:
    return after >= max(1.0, t.LAG_GROWS * before)


def is_farther_behind(facts: Facts, control: Facts) -> bool:
    """Whether a run was sampled by older weights than its control, beyond what two asynchronous runs differ by."""
    of_run, of_control = declared_lag(facts).at_fall, declared_lag(control).at_fall
    return of_run >= max(of_control + 1, t.LAG_GROWS * of_control)


def is_declared_fresh(facts: Facts) -> bool:
    """Whether the trace says of every step that the weights that sampled were those that scored."""
    values = facts.values("version_lag")
    known = values[np.isfinite(values)]
    return bool(len(known)) and not known.any()
