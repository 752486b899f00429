"""When the length-decay schedule would have acted on a recorded run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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
    """Run the scheduler's own detector over the recorded lengths; a step without responses keeps the length before it."""
    lengths = _observed(length)
    decay = LengthDecay()
    decays = list(_decays(decay, lengths))
    return Schedule(
        surge_step=decay.surge.step,
        decay_period=decay.decay_period,
        decays=tuple(decays),
        sensitivity=tuple(_under(kappa, variant, lengths) for kappa in KAPPAS for variant in VARIANTS),
    )


def _observed(length: Series) -> list[float | None]:
    """[n] lengths as a training loop observes them, one a step from step 1; steps without one repeat the last."""
    known = {int(step): float(value) for step, value in zip(length.steps, length.values, strict=True) if value == value}
    lengths: list[float | None] = []
    for step in range(1, int(length.steps[-1]) + 1):
        lengths.append(known.get(step, lengths[-1] if lengths else None))
    return lengths


def _decays(decay: LengthDecay, lengths: list[float | None]) -> Iterator[Decay]:
    before = 1.0
    for step, length in enumerate(lengths, 1):
        if decay.observe(length) != before:
            before = decay.scale
            yield Decay(step=step, scale=before, is_within_run=True)
    step = len(lengths)
    while decay.decay_period is not None and decay.scale > decay.floor:
        step += 1
        if decay.observe(None) != before:
            before = decay.scale
            yield Decay(step=step, scale=before, is_within_run=False)


def _under(kappa: float, variant: dict[str, int], lengths: list[float | None]) -> Sensitivity:
    surge = LengthSurge(kappa=kappa, **variant)
    for length in lengths:
        surge.observe(length)
    period = LengthDecay(surge).decay_period
    return Sensitivity(
        kappa=kappa, window=surge.window, gap=surge.gap, above=surge.above, of=surge.of, surge_step=surge.step,
        decay_period=period,
    )  # fmt: skip
