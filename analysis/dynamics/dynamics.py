"""Find when the series of a run changed, and which changed first."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ...schemas.errors import NothingToCompare, option
from ...schemas.steps import ALL_STEPS
from ...tracer.progress import Progress, no_progress
from ..facts.changes import FEWEST, LEAST_SD, PLANNED, ChangePoint, FirstChange, onsets_of, read_changes, read_outcomes
from ..facts.fall import Fall
from ..facts.read_series import read_series
from ..facts.series import Series
from ..statement import Statement
from ..trace.database import Database
from ..trace.pairs import parse_pair, tell_sampled
from ..views import open_database
from .motion import FEWEST_FOR_GROWTH, Dynamics, Growth, SeriesSummary, growths


def dynamics(
    trace: str | os.PathLike[str] | Database,
    *,
    pair: str = "train:rollout",
    steps: str = ALL_STEPS,
    progress: Progress = no_progress,
) -> Dynamics:
    """Report when each series of a run changed, and which changed first.

    Series come from `series.read_series`, on the scales of `quantities.KINDS`. Change points come from
    `changes.change_points` with 95 % intervals; if two intervals overlap, their order is undecided. The growth rate of k3 is
    reported as well. Questions that the trace cannot answer are listed. The onset of a collapse is the one found by
    `attribute`. `steps` (3:80, :100, 2:200:2) restricts it to part of the run.

    Raises NothingToCompare for a trace without steps, InvalidOption, TraceNotFound, NewerTrace or DamagedTrace.
    """
    names = parse_pair(pair)
    database = open_database(trace, steps)
    tell_sampled(database, names)
    source = database.sources[0]
    with database.telling(progress):
        series = read_series(database, pair=names)
    if not series and database.kept_steps:
        raise NothingToCompare(f"{source.run}: {option('steps', steps)} selects steps without any series")
    if not series:
        raise NothingToCompare(
            f"{source.run}: contains neither sequences nor metrics; record a run with tim-trace record"
        )
    with database.telling(progress):
        changes_of, fall = read_changes(database, names), read_outcomes(database, names).fall
    onsets = onsets_of(changes_of, {name: one.kind for name, one in series.items()})
    axis = next(iter(series.values())).steps
    growth = growths(series.get("k3"), changes_of.get("k3", ()))
    return Dynamics(
        trace=source.store.url,
        run=source.run,
        pair=pair,
        first_step=int(axis[0]),
        last_step=int(axis[-1]),
        num_steps=len(axis),
        summary_codes=tuple(summarise(changes_of, onsets, fall, growth, len(axis))),
        fall=fall,
        series=tuple(_summary(one, changes_of[name]) for name, one in series.items()),
        onsets=onsets,
        growth=growth,
        unanswered_codes=tuple(_unanswered(series, pair)),
    )


def _summary(series: Series, changes_of_series: tuple[ChangePoint, ...]) -> SeriesSummary:
    values = series.values[series.known]
    width = max(5, len(values) // 10)
    empty = np.full(1, np.nan)
    head, tail, whole = (part if len(part) else empty for part in (values[:width], values[-width:], values))
    return SeriesSummary(
        name=series.name,
        kind=series.kind,
        scale=series.scale,
        source=series.source,
        num_steps=len(values),
        first=float(np.median(head)),
        last=float(np.median(tail)),
        smallest=float(whole.min()),
        largest=float(whole.max()),
        not_finite=tuple(int(step) for step in series.not_finite),
        changes=changes_of_series,
    )


_NEEDED = (
    "reward", "reward_std_within_groups", "k3_positive", "grad_norm", "update_to_weight", "policy_lag", "clip_share",
    "changed_weights",
)  # fmt: skip
"""Series without which part of the answer is missing."""


def _unanswered(series: Mapping[str, Series], pair: str) -> Iterator[Statement]:
    if "k3" not in series:
        yield Statement(code="no_mismatch", values={"pair": pair})
    yield from (Statement(code=f"no_{name}") for name in _NEEDED if name not in series)
    longest = max(int(one.known.sum()) for one in series.values())
    if longest < FEWEST:
        least = {"changes": FEWEST, "rates": FEWEST_FOR_GROWTH}
        yield Statement(code="too_short", values={"num_steps": longest, **least})


def summarise(
    changes: Mapping[str, Sequence[ChangePoint]],
    onsets: Sequence[FirstChange],
    fall: Fall | None,
    growth: Sequence[Growth],
    num_steps: int,
) -> Iterator[Statement]:
    """Yield the summary: first change, collapse, planned changes, growth of k3 at the end."""
    yield _first(onsets, num_steps)
    if fall is not None:
        yield Statement(code="fall", values={"outcome": fall.outcome, "step": fall.step, "kind": fall.kind})
    for name in PLANNED:
        if changes.get(name):
            steps = ", ".join(str(change.step) for change in changes[name][:5])
            yield Statement(code="planned_change", values={"series": name, "steps": steps})
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
