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


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """The first step near a fall at which a quantity leaves what it was, and stays away."""

    step: int
    size_in_sd: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstMoves:
    """The first move of each quantity that has one."""

    of: Mapping[str, Move]
    """`reward`, `entropy`, `length`, `mean_abs_d`, `grad_norm`, `update_to_weight`; `sampled` and `trained`: mean logprobs of what was
    sampled to the engine and to the trainer; `distance`: trained less the reference's; `relation`: correlation of likelihood and reward
    within groups."""

    def step(self, name: str) -> int | None:
        """The step of a quantity's move; None where it has none."""
        move = self.of.get(name)
        return None if move is None else move.step

    def moves_at(self, step: int, *names: str) -> bool:
        """Whether one of some quantities had moved by a step."""
        return any(name in self.of and self.of[name].step <= step for name in names)


def first_moves(series: Mapping[str, Series], rollouts: Rollouts, fall: Fall) -> FirstMoves:
    """Look for the first move of each quantity from shortly before the interval of a fall to the loss of a good part."""
    first, last = fall.interval[0] - int(t.AHEAD) - 2, max(fall.interval[1], fall.fallen)
    columns = {"sampled": (*rollouts.sampled_by_step, 0.005), "trained": (*rollouts.likelihood_by_step, 0.005)}
    columns["distance"] = (*rollouts.reference_distance_by_step, 0.005)
    columns["relation"] = (*relation_by_step(rollouts, "likelihood", "reward"), 0.05)
    for name, least in _LOGARITHMS.items():
        if name in series:
            one = series[name]
            columns[name] = (one.steps, np.log(np.maximum(one.values, 1e-6)), least)
    if "reward" in series:
        one = series["reward"]
        columns["reward"] = (one.steps, one.values, 0.02 * float(np.nanstd(one.values)))
    found = {name: _first(*column, first=first, last=last) for name, column in columns.items()}
    return FirstMoves(of={name: move for name, move in found.items() if move is not None})


def _first(steps: np.ndarray, values: np.ndarray, least: float, *, first: int, last: int) -> Move | None:
    known = np.isfinite(values)
    steps, values = steps[known], values[known]
    for place in np.flatnonzero((steps >= first) & (steps <= last)):
        base = values[max(place - _BASE, 0) : place]
        if len(base) < _FEWEST:
            continue
        scatter = max(robust_sd(base), robust_sd(np.diff(base)) / np.sqrt(2), float(base.std()) / 2, least, 1e-12)
        off = (values[place : place + 1 + _NEXT] - np.median(base)) / scatter
        beside = np.sign(off[0]) * off[1:] >= t.MOVES_SD * t.MOVES_ON
        if abs(off[0]) >= t.MOVES_SD and beside.sum() >= min(_NEXT - 1, len(beside)):
            return Move(step=int(steps[place]), size_in_sd=float(off[0]))
    return None
