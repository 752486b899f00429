"""How a run moved, in sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .changes import FEWEST, RAMP, ChangePoint
from .laws import Growth
from .onsets import LEAST_SD, PLANNED, Onset
from .schedule import Schedule


def sentences(
    changes: Mapping[str, Sequence[ChangePoint]],
    onsets: Sequence[Onset],
    schedule: Schedule | None,
    growth: Sequence[Growth],
    num_steps: int,
) -> tuple[str, ...]:
    """What moved first and when, or that nothing did; the planned; the surge; the compounding."""
    told = [_first(onsets, num_steps)]
    told += [_planned(name, changes[name]) for name in PLANNED if changes.get(name)]
    if schedule is not None and schedule.surge_step is not None:
        told.append(
            f"Responses surged at step {schedule.surge_step}: the schedule of arXiv 2602.01826 would halve the learning rate "
            f"every {schedule.decay_period} steps."
        )
    last = next((each for each in growth if each.part == "last third"), None)
    if last is not None and last.doubling is not None:
        verb = "doubles" if last.doubling > 0 else "halves"
        told.append(f"In the last third of the run k3 {verb} every {abs(last.doubling):.3g} steps.")
    return tuple(told)


def _first(onsets: Sequence[Onset], num_steps: int) -> str:
    if num_steps < FEWEST:
        return f"What moved first cannot be said of {num_steps} step{'s' if num_steps > 1 else ''}."
    if not onsets:
        return (
            f"Nothing changed its course by {LEAST_SD:g} or more standard deviations of its own scatter: a series moves, if "
            "at all, along one straight line."
        )
    first = [onset for onset in onsets if onset.may_be_first]
    if len(first) == 1:
        after = f", before {', '.join(each.name for each in onsets[1:4])}" if len(onsets) > 1 else ""
        return f"{told(first[0])} moved first{after}."
    return f"Which moved first is not decided between {'; '.join(told(each) for each in first)}."


def told(onset: Onset) -> str:
    """An onset in words.

    A jump takes one step; a ramp's end is where it had led to.
    """
    change = onset.change
    span = f"95 % interval {change.low} to {change.high}" if change.low < change.high else "sure to a step"
    how = "ramps" if change.kind == RAMP else "jumps"
    return f"{onset.name} ({how} at step {change.step}, {span}; {change.before:.3g} to {change.after:.3g})"


def _planned(name: str, changes: Sequence[ChangePoint]) -> str:
    steps = ", ".join(str(change.step) for change in changes[:5])
    return f"The {name.replace('_', ' ')}, which is set and not observed, changes its course at step {steps}."
