"""What moves first where a run falls, to the step: each quantity beside the steps right before.

A change point of a series has an interval of several steps. What broke at one step shows itself in the order in which quantities
leave what they were: prompts and what is sampled, its reward, how both go together, the gradient, and a step later the policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ..dynamics.fall import Fall
from ..dynamics.series import Series
from ..statistics.noise import robust_sd
from . import thresholds as t
from .rollouts import Rollouts, relation_by_step

_BASE = 15
"""Steps before a step that it is held against."""
_FEWEST = 4
_NEXT = 3
"""Steps after it of which two have to lie off as well."""
_LOGARITHMS = {"entropy": 0.05, "mean_abs_d": 0.3, "grad_norm": 0.05, "update_to_weight": 0.05, "length": 0.01}
"""Series that are looked at as logarithms -> the least scatter."""
POLICY = ("sampled", "trained", "entropy", "length")
"""What a policy moves."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """A quantity by step, on the scale that it is looked at on."""

    steps: np.ndarray
    values: np.ndarray
    least: float
    """The least scatter."""

    def off(self, place: int) -> np.ndarray:
        """By how many standard deviations of the steps before a value and the next three lie off; empty after too few."""
        base = self.values[max(place - _BASE, 0) : place]
        if len(base) < _FEWEST:
            return np.empty(0)
        scatter = max(robust_sd(base), robust_sd(np.diff(base)) / np.sqrt(2), float(base.std()) / 2, self.least, 1e-12)
        return np.asarray((self.values[place : place + 1 + _NEXT] - np.median(base)) / scatter)

    def moves(self, place: int) -> float:
        """Standard deviations by which a value leaves what was before, where the next ones stay away; else 0."""
        off = self.off(place)
        if not len(off) or abs(off[0]) < t.MOVES_SD:
            return 0.0
        beside = np.sign(off[0]) * off[1:] >= t.MOVES_SD * t.MOVES_ON
        return float(off[0]) if beside.sum() >= min(_NEXT - 1, len(beside)) else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """When quantities leave what they were."""

    columns: Mapping[str, Quantity]
    """`reward`, `entropy`, `length`, `mean_abs_d`, `grad_norm`, `update_to_weight`; `loss`; `sampled` and `trained`: mean logprobs of what
    was sampled to the engine and to the trainer; `distance`: trained less the reference's; `relation`: correlation of likelihood and
    reward within groups, `follows` that of advantage and reward, `leaves` that of advantage and distance, `surprises` that of advantage and
    information."""
    first: int
    """The first step at which a fall may have begun with a move."""
    last: int
    """The last one."""

    def size(self, name: str, step: int) -> float:
        """Standard deviations of a quantity's move at a step; 0 where it has none."""
        column = self.columns.get(name)
        place = -1 if column is None else int(np.searchsorted(column.steps, step))
        if column is None or place >= len(column.steps) or column.steps[place] != step:
            return 0.0
        return column.moves(place)

    def step(self, name: str) -> int | None:
        """The first step near the fall at which a quantity moves; None where there is none."""
        column = self.columns.get(name)
        if column is None:
            return None
        near = column.steps[(column.steps >= self.first) & (column.steps <= self.last)]
        return next((int(step) for step in near if self.size(name, int(step))), None)

    def moves_at(self, step: int, *names: str) -> bool:
        """Whether one of some quantities moves at a step or within the few before it."""
        return any(self.size(name, at) for name in names for at in range(step - int(t.AHEAD) - 1, step + 1))

    def breaks(self, name: str) -> int | None:
        """The first step from which a correlation is lost for good, until the fall is there; None where it is not."""
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
    """The quantities that may move, and the steps at which a fall may have begun with that."""
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
