from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...schemas.errors import NothingToCompare, option
from ...schemas.results import Result
from ...schemas.steps import ALL_STEPS
from ...tracer.progress import Progress, no_progress
from ..facts.changes import FEWEST, ChangePoint, change_points, known_run, read_changes, read_fall
from ..facts.read_series import read_series
from ..facts.series import LINEAR, LOG, MISMATCH, Fall, Series
from ..statement import Statement
from ..statistics.intervals import student_quantile
from ..statistics.location import RAMP
from ..statistics.noise import highest_long_run_variance, peaks, robust_sd
from ..trace.columns import parse_pair, tell_sampled
from ..trace.database import Database
from ..views import open_database


def dynamics(
    trace: str | os.PathLike[str] | Database,
    *,
    pair: str = "train:rollout",
    steps: str = ALL_STEPS,
    progress: Progress = no_progress,
) -> Dynamics:
    """Report when each series of a run changed, and which changed first.

    Changes have 95% intervals. If two intervals overlap, the order of the changes is undecided. The result also
    contains k3's growth rate and the questions that the trace cannot answer. A collapse is reported at the onset found
    by `attribute`. `steps` (3:80, :100, 2:200:2) restricts the report to part of the run. Steps outside that part still
    help to find changes.

    Raises NothingToCompare for a trace without steps, InvalidOption, TraceNotFound, NewerTrace or DamagedTrace.
    """
    names = parse_pair(pair)
    database = open_database(trace, steps)
    tell_sampled(database, names)
    source = database.sources[0]
    with database.telling(progress):
        series = read_series(database, pair=names)
        if not series:
            problem = " has neither sequences nor metrics; record a run with tim-trace record"
            if database.kept_steps:
                problem = f": {option('steps', steps)} matches no step with series values; choose different steps"
            raise NothingToCompare(f"{source.run}{problem}")
        axis = next(iter(series.values())).steps
        known, later = known_run(database, names)
        fall = read_fall(known, names)
        known_series = read_series(known, pair=names)
        changes_of = {
            name: tuple(c for c in changes or peaks_of(known_series[name]) if c.low <= axis[-1] and c.high >= axis[0])
            for name, changes in read_changes(known, names).items()
        }
    onsets = onsets_of(changes_of, {name: one.kind for name, one in known_series.items()})
    growth = growths(series.get("k3"), changes_of.get("k3", ()))
    num_known = len(next(iter(known_series.values())).steps)
    return Dynamics(
        trace=source.store.url, run=source.run, pair=pair, first_step=int(axis[0]), last_step=int(axis[-1]),
        num_steps=len(axis), summary_codes=tuple(summarise(changes_of, onsets, fall, growth, num_known, later)),
        fall=fall, later=later, series=tuple(_summary(one, changes_of.get(name, ())) for name, one in series.items()),
        onsets=onsets, growth=growth, unanswered_codes=tuple(_unanswered(known_series, pair)),
    )  # fmt: skip


LEAST_SD = 2.0
"""Minimum size of a series' first change, relative to the scatter. Smaller changes are skipped."""

_PLANNED = "learning_rate"

PEAKS, PEAKS_SD = "peaks", 5.0
"""Minimum change of peaks, relative to the scatter before. The false-positive rate in pure noise is 0.01 or less."""


def peaks_of(series: Series) -> Iterator[ChangePoint]:
    """Yield the changes of a mismatch that only some steps have, such as an engine that is stale at every other step."""
    if series.kind == MISMATCH and series.scale == LOG:
        steps, logs = series.steps[series.known], series.scaled[series.known]
        for change in change_points(Series(series.name, steps, peaks(logs), LINEAR, series.kind)):
            if abs(change.after - change.before) > PEAKS_SD * robust_sd(logs[steps < change.step]):
                yield replace(change, kind=PEAKS, before=math.exp(change.before), after=math.exp(change.after))


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstChange:
    name: str
    kind: str
    change: ChangePoint
    undecided: tuple[str, ...]
    may_be_first: bool


def onsets_of(changes: Mapping[str, Sequence[ChangePoint]], kinds: Mapping[str, str]) -> tuple[FirstChange, ...]:
    large = {name: [each for each in found if abs(each.size_in_sd) >= LEAST_SD] for name, found in changes.items()}
    moved = {name: found[0] for name, found in large.items() if found and name != _PLANNED}
    ends = min((change.high for change in moved.values()), default=0)
    order = sorted(moved, key=lambda name: (moved[name].step, moved[name].high, name))
    found = []
    for name in order:
        change, is_early = moved[name], moved[name].low <= ends
        overlap = [other for other in order if change.low <= moved[other].high and moved[other].low <= change.high]
        others = tuple(other for other in overlap if other != name)
        found.append(FirstChange(name=name, kind=kinds[name], change=change, undecided=others, may_be_first=is_early))
    return tuple(found)


def _summary(series: Series, changes_of_series: tuple[ChangePoint, ...]) -> SeriesSummary:
    values = series.values[series.known]
    width = max(5, len(values) // 10)
    empty = np.full(1, np.nan)
    head, tail, whole = (part if len(part) else empty for part in (values[:width], values[-width:], values))
    return SeriesSummary(
        name=series.name, kind=series.kind, scale=series.scale, source=series.source, num_steps=len(values),
        first=float(np.median(head)), last=float(np.median(tail)), smallest=float(whole.min()),
        largest=float(whole.max()), not_finite=tuple(int(step) for step in series.not_finite),
        changes=changes_of_series,
    )  # fmt: skip


_NEEDED = (
    "reward", "reward_std_within_groups", "k3_positive", "grad_norm", "update_to_weight", "policy_lag", "clip_share",
    "changed_weights",
)  # fmt: skip


def _unanswered(series: Mapping[str, Series], pair: str) -> Iterator[Statement]:
    if "k3" not in series:
        yield Statement(code="no_mismatch", values={"pair": pair})
    yield from (Statement(code=f"no_{name}") for name in _NEEDED if name not in series)
    longest = max(int(one.known.sum()) for one in series.values())
    if longest < FEWEST:
        least = {"changes": FEWEST, "rates": FEWEST_FOR_GROWTH}
        yield Statement(code="too_short", values={"num_steps": longest, **least})


def summarise(
    changes: Mapping[str, Sequence[ChangePoint]], onsets: Sequence[FirstChange], fall: Fall | None,
    growth: Sequence[Growth], num_steps: int, later: Fall | None = None,
) -> Iterator[Statement]:  # fmt: skip
    yield _first(onsets, num_steps)
    if fall is not None:
        yield Statement(code="fall", values={"outcome": fall.outcome, "step": fall.step, "kind": fall.kind})
    if later is not None:
        yield Statement(code="later", values={"outcome": later.outcome, "step": later.step, "verb": later.verb})
    if planned := changes.get(_PLANNED):
        steps = ", ".join(str(change.step) for change in planned[:5])
        yield Statement(code="planned_change", values={"series": _PLANNED, "steps": steps})
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


FEWEST_FOR_GROWTH = 8
"""Minimum number of steps to fit a growth rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    part: str
    """Fitted part of the run: `run` (all of it) or `last third`."""
    num_steps: int
    slope: float
    """Change in ln k3 per step."""
    low: float
    """`low` to `high` is the slope's 95% interval, allowing for autocorrelation (docs/evidence/intervals.md)."""
    high: float
    growth: float
    """Relative growth per step: exp(slope) - 1."""
    doubling: float | None
    """Number of steps in which k3 doubles, or halves if the number is negative. None if the slope's interval contains 0."""


def growths(k3: Series | None, changes: Sequence[ChangePoint] = ()) -> tuple[Growth, ...]:
    """Fit k3's exponential growth (arXiv 2510.18855) over the run and its last third.

    If k3 jumps, only the last third is fitted, and only after the last jump.
    """
    if k3 is None:
        return ()
    there = k3.known & (k3.values > 0)
    steps, logs = k3.steps[there], np.log(k3.values[there])
    jumps = [change.high for change in changes if change.kind != RAMP]
    last = max(len(steps) - len(steps) // 3, int(np.searchsorted(steps, max(jumps, default=-1), side="right")))
    parts = [("last third", steps[last:], logs[last:])]
    if not jumps:
        parts.insert(0, ("run", steps, logs))
    return tuple(_growth(part, t, y) for part, t, y in parts if len(t) >= FEWEST_FOR_GROWTH)


def _growth(part: str, steps: np.ndarray, logs: np.ndarray) -> Growth:
    t = (steps - steps[0]).astype(float)  # subtract first: large integers lose precision in float64
    t -= t.mean()
    variance, covariance = np.cov(t, logs, bias=True)[0]
    slope = float(covariance / variance)
    scatter = highest_long_run_variance(logs - logs.mean() - slope * t, 2)
    reach = student_quantile(0.975, len(t) - 2) * math.sqrt(scatter / float(t @ t))
    decided = abs(slope) > reach
    return Growth(
        part=part, num_steps=len(steps), slope=slope, low=slope - reach, high=slope + reach, growth=math.expm1(slope),
        doubling=math.log(2) / slope if decided else None,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesSummary:
    name: str
    kind: str
    scale: str
    source: str
    num_steps: int
    """Steps with a value."""
    first: float
    """Median over the first tenth of the run (at least five steps)."""
    last: float
    """Median over the last tenth of the run (at least five steps)."""
    smallest: float
    largest: float
    not_finite: tuple[int, ...]
    changes: tuple[ChangePoint, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dynamics(Result):
    """Changes in a run's series, and the order in which they happened."""

    _text = "tim_trace.analysis.dynamics.text:dynamics_text"

    trace: str
    run: str
    pair: str
    first_step: int
    last_step: int
    num_steps: int
    summary_codes: tuple[Statement, ...]
    """Codes in text.SUMMARY."""
    fall: Fall | None
    """The collapse found by `attribute`. None if the run has none, or if the collapse begins after `steps`."""
    later: Fall | None = None
    """A collapse that begins after `steps`."""
    series: tuple[SeriesSummary, ...]
    onsets: tuple[FirstChange, ...]
    """First change in each series, earliest first."""
    growth: tuple[Growth, ...]
    unanswered_codes: tuple[Statement, ...]
    """Questions that the trace cannot answer (codes in text.UNANSWERED)."""
