"""Find the exact order in which quantities change around a drop.

A change point is known only within an interval of several steps. A fault at a single step shows in the order in which
quantities leave their earlier level: prompts and sampled tokens, then their rewards, the correlation of the two, the
gradient, and one step later the policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ..statistics.noise import robust_sd
from . import thresholds as t
from .fall import Fall
from .relations import relation_by_step
from .rollouts import Rollouts
from .series import Series

_BASE = 15
"""Number of earlier steps that a step is compared with."""
_FEWEST = 4
_NEXT = 3
"""Number of steps checked after a change; at least two of them must be at the new level."""
_LOGARITHMS = {"entropy": 0.05, "mean_abs_d": 0.3, "grad_norm": 0.05, "update_to_weight": 0.05, "length": 0.01}
"""Series compared on a log scale -> minimum scatter assumed, as a natural logarithm."""
POLICY = ("sampled", "trained", "entropy", "length")
"""Quantities that change only if the policy changes."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """A quantity by step, on the scale on which it is compared."""

    steps: np.ndarray
    values: np.ndarray
    least: float
    """Minimum scatter assumed, on this scale."""

    def off(self, place: int) -> np.ndarray:
        """Return how far a value and the next three are from the earlier level, in standard deviations.

        Empty if there are too few earlier steps."""
        base = self.values[max(place - _BASE, 0) : place]
        if len(base) < _FEWEST:
            return np.empty(0)
        scatter = max(robust_sd(base), robust_sd(np.diff(base)) / np.sqrt(2), float(base.std()) / 2, self.least, 1e-12)
        return np.asarray((self.values[place : place + 1 + _NEXT] - np.median(base)) / scatter)

    def moves(self, place: int) -> float:
        """Return the size of a lasting change at an index, in standard deviations; 0 if the change does not last."""
        off = self.off(place)
        if not len(off) or abs(off[0]) < t.MOVES_SD:
            return 0.0
        beside = np.sign(off[0]) * off[1:] >= t.MOVES_SD * t.MOVES_ON
        return float(off[0]) if beside.sum() >= min(_NEXT - 1, len(beside)) else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """The quantities of a run around its drop, and the steps at which they leave their earlier level."""

    columns: Mapping[str, Quantity]
    """`reward`, `entropy`, `length`, `mean_abs_d`, `grad_norm`, `update_to_weight`, `loss`; `sampled` and `trained`: mean logprob of the
    responses under engine and trainer; `distance`: `trained` minus the reference's. Correlations within groups:
    `relation` between likelihood and reward, `follows` between advantage and reward, `leaves` between advantage and
    distance, `surprises` between advantage and information."""
    first: int
    """First step at which a change may have caused the drop."""
    last: int
    """Last step at which a change may have caused the drop."""

    def size(self, name: str, step: int) -> float:
        """Return the size of a quantity's change at a step, in standard deviations; 0 if it does not change."""
        column = self.columns.get(name)
        place = -1 if column is None else int(np.searchsorted(column.steps, step))
        if column is None or place >= len(column.steps) or column.steps[place] != step:
            return 0.0
        return column.moves(place)

    def step(self, name: str) -> int | None:
        """Return the first step near the drop at which a quantity changes, or None."""
        column = self.columns.get(name)
        if column is None:
            return None
        near = column.steps[(column.steps >= self.first) & (column.steps <= self.last)]
        return next((int(step) for step in near if self.size(name, int(step))), None)

    def moves_at(self, step: int, *names: str) -> bool:
        """Return True if any of the named quantities changes at a step or a few steps before it."""
        return any(self.size(name, at) for name in names for at in range(step - int(t.AHEAD) - 1, step + 1))

    def breaks(self, name: str) -> int | None:
        """Return the first step, at the drop or before it, from which a correlation is lost for good, or None."""
        column = self.columns.get(name)
        if column is None:
            return None
        end = int(np.searchsorted(column.steps, self.last, side="right"))
        for place in range(_FEWEST, end):
            off = column.off(place)
            if len(off) < 2 or off[: _NEXT - 1].max() > -t.BREAKS_SD:
                continue
            base = column.values[max(place - _BASE, 0) : place]
            usual, rest = float(np.median(base)), column.values[place : max(end, place + _NEXT)]
            lost = rest < usual - max(t.BREAK_LOSES * abs(usual), t.BREAKS_SD / 2 * max(robust_sd(base), column.least))
            if usual >= t.BREAKABLE and lost.mean() >= t.ALMOST_ALL and len(rest) >= _NEXT - 1:
                return int(column.steps[place])
        return None


NOTHING = Moves(columns={}, first=0, last=-1)


def read_moves(series: Mapping[str, Series], rollouts: Rollouts, fall: Fall) -> Moves:
    """Read the quantities to check for changes, and the range of steps in which a change could have caused the drop."""
    found = {
        "sampled": (*rollouts.sampled_by_step, 0.005),
        "trained": (*rollouts.likelihood_by_step, 0.005),
        "distance": (*rollouts.reference_distance_by_step, 0.005),
        "relation": (*relation_by_step(rollouts, "likelihood", "reward"), 0.05),
        "leaves": (*relation_by_step(rollouts, "distance", "advantage"), 0.05),
        "follows": (*relation_by_step(rollouts, "reward", "advantage"), 0.05),
        "surprises": (*relation_by_step(rollouts, "information", "advantage"), 0.05),
    }
    for name, least in _LOGARITHMS.items():
        if name in series:
            found[name] = (series[name].steps, np.log(np.maximum(series[name].values, 1e-6)), least)
    for name, share in (("reward", 0.02), ("loss", 0.02)):
        if name in series:
            found[name] = (series[name].steps, series[name].values, share * float(np.nanstd(series[name].values)))
    columns = {}
    for name, (steps, values, least) in found.items():
        known = np.isfinite(values)
        columns[name] = Quantity(steps[known], values[known], least)
    first, last = fall.interval[0] - int(t.AHEAD) - 2, fall.latest
    return Moves(columns=columns, first=first, last=last)
