"""A reward that drops from one step to the next, and whether the policy changed with it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ..dynamics.fall import FALL_SD, Fall
from ..dynamics.series import Series
from ..statement import Measured
from ..statistics.noise import robust_sd
from . import thresholds as t
from .rollouts import Rollouts

_BESIDE = 3
"""Steps before and after a drop that are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """The steepest descent of the reward around the beginning of a fall."""

    step: int
    """The first step after it."""
    share: float
    """Share of the reward's whole loss that it lost at this step."""
    is_early: bool
    """Whether too few steps came before for the policy to be known."""
    policy: float
    """By how many standard deviations of their scatter entropy, length and the likelihood of what was sampled differ after
    it, the largest of them."""

    @property
    def values(self) -> dict[str, Measured]:
        """The numbers of its evidence."""
        return {"share": min(self.share, 1.0), "step": self.step}

    @property
    def is_of_reward(self) -> bool:
        """Whether the policy stayed what it was, so that the same responses earn less."""
        return self.share > t.DROPS and self.policy < t.SAME_POLICY and not self.is_early

    @property
    def is_of_policy(self) -> bool:
        """Whether the policy became another one within these few updates."""
        return self.share > t.DROPS and (self.policy > t.OTHER_POLICY or self.is_early)


def read_drop(series: Mapping[str, Series], rollouts: Rollouts, fall: Fall | None) -> Drop | None:
    """The drop of the recorded reward where a fall begins; None without a reward, or where it does not drop."""
    reward = series.get("reward")
    if fall is None or reward is None:
        return None
    steps, values = reward.steps[reward.known], reward.values[reward.known]
    margin = max(len(steps) // 20, _BESIDE)
    first = max(int(np.searchsorted(steps, fall.low)) - margin, 2)  # an update before it
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
    """Steps and values of what changes with every policy: entropy, length, likelihood of its own responses."""
    of_policy = [series[name] for name in ("entropy", "length") if name in series]
    return [*((one.steps[one.known], one.values[one.known]) for one in of_policy), rollouts.likelihood_by_step]


def _moved(steps: np.ndarray, values: np.ndarray, step: int) -> float:
    """By how many standard deviations three values from a step on differ from three before; a hundredth is no difference."""
    place = int(np.searchsorted(steps, step))
    before, after = values[max(place - _BESIDE, 0) : place], values[place : place + _BESIDE]
    if not len(before) or not len(after):
        return 0.0
    scatter = max(_scatter(values), 0.01 * abs(float(before.mean())), 1e-12)
    return abs(float(after.mean() - before.mean())) / scatter


def _scatter(values: np.ndarray) -> float:
    """Standard deviation of the difference of two means of three neighbours, by what neighbours differ in."""
    return float(robust_sd(np.diff(values)) / math.sqrt(_BESIDE))
