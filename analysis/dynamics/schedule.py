"""When the length-decay schedule would have acted on a recorded run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .length_decay import LengthDecay
from .length_surge import LengthSurge
from .quantities import Series

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
    """Run the scheduler's own detector over the recorded steps; a step without responses keeps the length before it."""
    decay = LengthDecay(_surge(length))
    last = int(length.steps[-1])
    return Schedule(
        surge_step=decay.surge.step,
        decay_period=decay.decay_period,
        decays=tuple(_decays(decay, last)),
        sensitivity=tuple(_under(kappa, variant, length) for kappa in KAPPAS for variant in VARIANTS),
    )


def _surge(length: Series, **settings: Any) -> LengthSurge:
    """The detector after the run. Steps may be numbered with gaps, as by timestamps: its clock shows the number of each."""
    surge = LengthSurge(**settings)
    held = None
    for step, value in zip(length.steps.tolist(), length.values.tolist(), strict=True):
        held = held if value != value else value
        surge.num_steps = step - 1
        surge.observe(held)
    return surge


def _decays(decay: LengthDecay, last: int) -> Iterator[Decay]:
    """Decays at the multiples of the period, the first of which comes after the surge."""
    step = 0
    while decay.decay_period is not None and decay.scale > decay.floor:
        step += decay.decay_period
        decay.surge.num_steps = step - 1
        yield Decay(step=step, scale=decay.observe(None), is_within_run=step <= last)


def _under(kappa: float, variant: dict[str, int], length: Series) -> Sensitivity:
    surge = _surge(length, kappa=kappa, **variant)
    period = LengthDecay(surge).decay_period
    return Sensitivity(
        kappa=kappa, window=surge.window, gap=surge.gap, above=surge.above, of=surge.of, surge_step=surge.step,
        decay_period=period,
    )  # fmt: skip
