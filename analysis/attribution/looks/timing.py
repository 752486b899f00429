"""The growth of the mismatch, and the lag of the sampling weights."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...facts import thresholds as ft
from ...facts.changes import ChangePoint
from .. import thresholds as t
from ..run_facts import Facts


def largest_rise(facts: Facts) -> ChangePoint | None:
    """Return the largest growth of the mismatch, or None."""
    changes = [change for change in facts.changes.get("mean_abs_d", ()) if change.size_in_sd > 3.0]
    return max(changes, key=lambda change: change.after / max(change.before, 1e-12), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredLag:
    """Number of updates between the weights that sampled a sequence and those that scored it; 0 if unknown."""

    at_fall: float
    """Largest median lag over a tenth of the run around the onset; without a drop, over the whole run."""
    usual: float
    """Median lag before the onset, while the run still learned. If less than a tenth of the run precedes the onset, it
    covers the steps until a good part of the outcome is lost; without a drop, all steps."""

    @property
    def grew(self) -> bool:
        """True if the lag grew; a constant lag is normal in asynchronous training."""
        return _grew(self.usual, self.at_fall)


def declared_lag(facts: Facts) -> DeclaredLag:
    """Return the recorded lag before the drop and around its onset."""
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


def _grew(before: float, after: float) -> bool:
    return after >= max(1.0, t.LAG_GROWS * before)


def is_farther_behind(facts: Facts, control: Facts) -> bool:
    """Return True if a run lags further behind than its baseline run, beyond the usual scatter of asynchronous runs."""
    of_run, of_control = declared_lag(facts).at_fall, declared_lag(control).at_fall
    return of_run >= max(of_control + 1, t.LAG_GROWS * of_control)


def is_declared_fresh(facts: Facts) -> bool:
    """Return True if every recorded lag is 0: the sampling weights were the scoring weights."""
    values = facts.values("version_lag")
    known = values[np.isfinite(values)]
    return bool(len(known)) and not known.any()
