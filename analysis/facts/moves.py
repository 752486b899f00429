"""Find the exact order in which quantities change around a drop, and how steeply the reward drops.

A change point is known only within an interval of several steps. A fault at a single step shows in the order in which
quantities leave their earlier level: prompts and sampled tokens, then their rewards, the correlation of the two, the
gradient, and one step later the policy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ..statement import Measured
from ..statistics.noise import robust_sd
from . import thresholds as t
from .fall import FALL_SD, Fall
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


_BESIDE = 3
"""Number of steps compared on each side of a drop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """The steepest descent of the reward near the onset of the drop."""

    step: int
    """First step after the steepest descent."""
    share: float
    """Share of the reward's total loss that occurs at `step`."""
    is_early: bool
    """True if too few steps precede the descent to know the policy before it."""
    policy: float
    """Largest change of entropy, length and likelihood of the responses, in standard deviations."""

    @property
    def values(self) -> dict[str, Measured]:
        """The numbers reported with the evidence, by name."""
        return {"share": min(self.share, 1.0), "step": self.step}

    @property
    def is_of_reward(self) -> bool:
        """True if the reward drops abruptly while the policy is unchanged: the same responses earn less."""
        return self.share > t.DROPS and self.policy < t.SAME_POLICY and not self.is_early

    @property
    def is_of_policy(self) -> bool:
        """True if the policy changed in the few updates around the descent."""
        return self.share > t.DROPS and (self.policy > t.OTHER_POLICY or self.is_early)


def read_drop(series: Mapping[str, Series], rollouts: Rollouts, fall: Fall | None) -> Drop | None:
    """Return the steepest descent of the recorded reward near the onset; None if there is no reward or no descent."""
    reward = series.get("reward")
    if fall is None or reward is None:
        return None
    steps, values = reward.steps[reward.known], reward.values[reward.known]
    margin = max(len(steps) // 20, _BESIDE)
    first = max(int(np.searchsorted(steps, fall.low)) - margin, 2)  # at least one update must precede the descent
    last = min(int(np.searchsorted(steps, fall.fallen)) + margin, len(steps) - _BESIDE)
    if last <= first or len(steps) < 4 * _BESIDE:
        return None
    losses = [values[max(i - _BESIDE, 0) : i].mean() - values[i : i + _BESIDE].mean() for i in range(first, last)]
    place = first + int(np.argmax(losses))
    end = values[-max(len(values) // 10, _BESIDE) :].mean()
    lost = values[max(place - 3 * _BESIDE, 0) : place].mean() - end
    if lost <= 0 or max(losses) < FALL_SD * max(_scatter(values), 1e-12):
        return None
    return Drop(
        step=int(steps[place]),
        share=float(max(losses) / lost),
        is_early=place < 2 * _BESIDE,
        policy=max(_moved(*one, int(steps[place])) for one in _of_policy(series, rollouts)),
    )


def _of_policy(series: Mapping[str, Series], rollouts: Rollouts) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the steps and values of each quantity that characterises the policy: entropy, length and likelihood."""
    of_policy = [series[name] for name in ("entropy", "length") if name in series]
    return [*((one.steps[one.known], one.values[one.known]) for one in of_policy), rollouts.likelihood_by_step]


def _moved(steps: np.ndarray, values: np.ndarray, step: int) -> float:
    """Return the mean of the three values from a step on minus that of the three before it, in standard deviations.

    The scatter is assumed to be at least
    a hundredth of the level."""
    place = int(np.searchsorted(steps, step))
    before, after = values[max(place - _BESIDE, 0) : place], values[place : place + _BESIDE]
    if not len(before) or not len(after):
        return 0.0
    scatter = max(_scatter(values), 0.01 * abs(float(before.mean())), 1e-12)
    return abs(float(after.mean() - before.mean())) / scatter


def _scatter(values: np.ndarray) -> float:
    """Return the standard deviation of a mean over _BESIDE values, from differences between neighbouring values."""
    return float(robust_sd(np.diff(values)) / math.sqrt(_BESIDE))
