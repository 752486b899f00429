"""Apply the length-based learning-rate schedule to a recorded run.

arXiv 2602.01826, algorithm 1: eta_t = max(eta_{t-1} / 2, eta_0 / 10) when t mod T = 0, with T = round(1.8 t_surge).
There is no decay before a surge of the response length. t counts updates from 1.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

from ...schemas.errors import InvalidOption
from ..facts.series import Series


class LengthSurge:
    """Online detector of a surge of the response length: growth by a factor within a few steps.

    arXiv 2602.01826 does not define the surge. Here it is the first t at which L / base is at least `kappa` in `above`
    of the last `of` steps, with L_t the mean response length of step t and base_t the median of L over [t - window -
    gap, t - gap). The gap keeps a rise over a few steps out of its own base.

    >>> surge = LengthSurge(window=4, gap=1, above=2, of=2)
    >>> [surge.observe(length) for length in (10, 11, 9, 10, 10, 30, 31, 30)]
    [False, False, False, False, False, False, True, False]
    >>> surge.step
    7
    """

    def __init__(self, *, kappa: float = 2.0, window: int = 20, gap: int = 5, above: int = 3, of: int = 5):
        """Raise InvalidOption for settings that never or always detect a surge."""
        if not kappa > 1:
            raise InvalidOption(f"got {kappa}; give a factor above 1, such as 2", option="kappa")
        if window < 1 or gap < 0 or not 1 <= above <= of:
            raise InvalidOption(
                f"length surge: got window {window}, gap {gap}, above {above} of {of}; give window >= 1, gap >= 0 and "
                "1 <= above <= of"
            )
        self.kappa, self.window, self.gap, self.above, self.of = kappa, window, gap, above, of
        self.num_steps = 0
        """Number of steps observed; the first is step 1."""
        self.step: int | None = None
        """Step at which the surge was detected; None if none has been detected."""
        self._lengths: deque[float] = deque(maxlen=window + gap)
        self._over: deque[bool] = deque(maxlen=of)

    def observe(self, length: float | None) -> bool:
        """Add the mean response length of the next step, in tokens; return True if the surge is at this step.

        None and NaN mean a step without responses. Only the first surge is detected.
        """
        self.num_steps += 1
        if self.step is not None or length is None or length != length:
            return False
        if len(self._lengths) == self.window + self.gap:
            base = median(list(self._lengths)[: self.window])
            self._over.append(length >= self.kappa * base > 0)
            if sum(self._over) >= self.above:
                self.step = self.num_steps
        self._lengths.append(float(length))
        return self.step is not None


FACTOR, FLOOR = 0.5, 0.1
"""Factor applied by each decay, and lowest learning rate relative to the initial one."""
_STRETCH = 1.8
KAPPAS = (1.5, 2.0, 3.0)
VARIANTS: tuple[dict[str, int], ...] = (
    {}, {"window": 10}, {"window": 40}, {"gap": 0}, {"gap": 10}, {"above": 1, "of": 1}, {"above": 5, "of": 5},
)  # fmt: skip
"""Detector settings tried for each kappa, in place of the defaults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decay:
    """One decay of the learning rate."""

    step: int
    scale: float
    """Learning rate from that step on, relative to the first."""
    is_within_run: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """Surge detected under one combination of detector settings."""

    kappa: float
    window: int
    gap: int
    above: int
    of: int
    surge_step: int | None
    decay_period: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Surge of the response length and the resulting schedule of arXiv 2602.01826."""

    surge_step: int | None
    """Step at which the response length surges; None if it never does."""
    decay_period: int | None
    """Number of steps between decays, round(1.8 surge_step); None without a surge."""
    decays: tuple[Decay, ...]
    """All decays down to the floor, including those after the end of the run."""
    sensitivity: tuple[Sensitivity, ...]


def schedule_of(length: Series) -> Schedule:
    """Run the detector over the recorded steps; a step without responses keeps the previous length."""
    surge_step = _surge(length).step
    period = None if surge_step is None else decay_period(surge_step)
    return Schedule(
        surge_step=surge_step,
        decay_period=period,
        decays=() if period is None else tuple(_decays(period, int(length.steps[-1]))),
        sensitivity=tuple(_under(kappa, variant, length) for kappa in KAPPAS for variant in VARIANTS),
    )


def decay_period(surge_step: int) -> int:
    """Return the number of steps from one decay to the next."""
    return max(1, round(_STRETCH * surge_step))


def _surge(length: Series, **settings: Any) -> LengthSurge:
    """Return the detector after the run; it counts by step numbers, which may have gaps."""
    surge = LengthSurge(**settings)
    held = None
    for step, value in zip(length.steps.tolist(), length.values.tolist(), strict=True):
        held = held if value != value else value
        surge.num_steps = step - 1
        surge.observe(held)
    return surge


def _decays(period: int, last: int) -> Iterator[Decay]:
    """Yield the decays at multiples of the period; the first comes after the surge."""
    step, scale = 0, 1.0
    while scale > FLOOR:
        step, scale = step + period, max(scale * FACTOR, FLOOR)
        yield Decay(step=step, scale=scale, is_within_run=step <= last)


def _under(kappa: float, variant: dict[str, int], length: Series) -> Sensitivity:
    surge = _surge(length, kappa=kappa, **variant)
    period = None if surge.step is None else decay_period(surge.step)
    settings = {name: getattr(surge, name) for name in ("window", "gap", "above", "of")}
    return Sensitivity(kappa=kappa, **settings, surge_step=surge.step, decay_period=period)
