"""When the length-decay schedule would have acted on a recorded run.

arXiv 2602.01826, algorithm 1: eta_t = max(eta_{t-1} / 2, eta_0 / 10) when t mod T = 0, with T = round(1.8 t_surge). Before a
surge of the response length nothing decays. t counts updates, the first is 1.
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
    """Sees when responses become longer by a factor within a few steps.

    arXiv 2602.01826 acts on this surge and does not define it. Here: with L_t the mean response length of step t and base_t
    the median of L over [t - window - gap, t - gap), it is the first t at which L / base is at least `kappa` in `above` of
    the last `of` steps. The gap keeps a rise that takes a few steps out of its own base.

    >>> surge = LengthSurge(window=4, gap=1, above=2, of=2)
    >>> [surge.observe(length) for length in (10, 11, 9, 10, 10, 30, 31, 30)]
    [False, False, False, False, False, False, True, False]
    >>> surge.step
    7
    """

    def __init__(self, *, kappa: float = 2.0, window: int = 20, gap: int = 5, above: int = 3, of: int = 5):
        """Raises InvalidOption for settings under which there is no surge, or always one."""
        if not kappa > 1:
            raise InvalidOption(f"got {kappa}; give a factor above 1, as 2", option="kappa")
        if window < 1 or gap < 0 or not 1 <= above <= of:
            raise InvalidOption(
                f"length surge: got window {window}, gap {gap}, above {above} of {of}; give window >= 1, gap >= 0 and "
                "1 <= above <= of"
            )
        self.kappa, self.window, self.gap, self.above, self.of = kappa, window, gap, above, of
        self.num_steps = 0
        """Steps observed; the first is step 1."""
        self.step: int | None = None
        """The surge; None before there is one."""
        self._lengths: deque[float] = deque(maxlen=window + gap)
        self._over: deque[bool] = deque(maxlen=of)

    def observe(self, length: float | None) -> bool:
        """Take the mean response length of the next step, in tokens, and return whether it is the surge.

        None and NaN are a step without responses. After the first surge nothing is one.
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
"""Of one decay, and of the first learning rate what is left at the end."""
_STRETCH = 1.8
KAPPAS = (1.5, 2.0, 3.0)
VARIANTS: tuple[dict[str, int], ...] = (
    {}, {"window": 10}, {"window": 40}, {"gap": 0}, {"gap": 10}, {"above": 1, "of": 1}, {"above": 5, "of": 5},
)  # fmt: skip
"""Settings of the detector beside its defaults, for each kappa."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decay:
    """One decay of the learning rate."""

    step: int
    scale: float
    """Learning rate over its first value, from that step on."""
    is_within_run: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """What a detector of these settings would have seen."""

    kappa: float
    window: int
    gap: int
    above: int
    of: int
    surge_step: int | None
    decay_period: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The surge of the response length, and what the schedule of arXiv 2602.01826 makes of it."""

    surge_step: int | None
    """None where responses did not surge."""
    decay_period: int | None
    """round(1.8 surge steps), in steps."""
    decays: tuple[Decay, ...]
    """Down to the floor, those after the run's end too."""
    sensitivity: tuple[Sensitivity, ...]


def schedule_of(length: Series) -> Schedule:
    """Run the detector over the recorded steps; a step without responses keeps the length before it."""
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
    """The detector after the run. Steps may be numbered with gaps, as by timestamps: its clock shows the number of each."""
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
