"""What the answer about a run's motion consists of, as codes and numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ..statement import Statement
from .changes import FEWEST, ChangePoint
from .fall import Fall
from .laws import Growth
from .onsets import LEAST_SD, PLANNED, FirstChange
from .schedule import Schedule


def summarise(
    changes: Mapping[str, Sequence[ChangePoint]],
    onsets: Sequence[FirstChange],
    fall: Fall | None,
    schedule: Schedule | None,
    growth: Sequence[Growth],
    num_steps: int,
) -> Iterator[Statement]:
    """What moved first; the fall; planned changes; a surge of lengths; how k3 compounds at the end."""
    yield _first(onsets, num_steps)
    if fall is not None:
        yield Statement(code="fall", values={"outcome": fall.outcome, "step": fall.step, "kind": fall.kind})
    for name in PLANNED:
        if changes.get(name):
            steps = ", ".join(str(change.step) for change in changes[name][:5])
            yield Statement(code="planned_change", values={"series": name, "steps": steps})
    if schedule is not None and schedule.surge_step is not None and schedule.decay_period is not None:
        values = {"step": schedule.surge_step, "decay_period": schedule.decay_period}
        yield Statement(code="length_surge", values=values)
    last = next((part for part in growth if part.part == "last third"), None)
    if last is not None and last.doubling is not None:
        code = "k3_doubles" if last.doubling > 0 else "k3_halves"
        yield Statement(code=code, values={"steps": abs(last.doubling)})


def _first(onsets: Sequence[FirstChange], num_steps: int) -> Statement:
    if num_steps < FEWEST:
        return Statement(code="too_short", values={"num_steps": num_steps, "min_steps": FEWEST})
    if not onsets:
        return Statement(code="no_change", values={"min_sd": LEAST_SD})
    first = [onset for onset in onsets if onset.may_be_first]
    if len(first) > 1:
        return Statement(code="first_undecided", values={"series": ", ".join(onset.name for onset in first)})
    return Statement(code="moved_first", values={"series": first[0].name, "step": first[0].change.step})
