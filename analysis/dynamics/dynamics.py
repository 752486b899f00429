"""How a run moved, and what moved first."""

from __future__ import annotations

import os

import numpy as np

from ...replay.steps import parse_steps
from ...schemas.errors import NothingToCompare
from ...tracer.progress import Progress, no_progress
from ..trace.database import Database, opened
from ..trace.pairs import parse_pair
from . import changes, laws, lead_lag
from .changes import ChangePoint, change_points
from .laws import entropy_law, growths
from .lead_lag import lead_lags
from .motion import Dynamics, Moved
from .onsets import onsets_of
from .quantities import Series
from .schedule import schedule_of
from .series import read_series
from .summary import sentences


def dynamics(
    trace: str | os.PathLike[str] | Database,
    *,
    pair: str = "train:rollout",
    steps: str = "all",
    progress: Progress = no_progress,
) -> Dynamics:
    """Say how a run moved: when each series changed, what moved first, and what leads what.

    Series are those of `series.read_series`, on the scales of `quantities.KINDS`; `steps` (3:80, :100, 2:200:2) takes a part
    of the run. Change points are those of `changes.change_points`, each with a 95 % interval: an order of two onsets
    whose intervals overlap is not decided. Then correlations over lags; the surge of the response length and the
    learning-rate schedule of arXiv 2602.01826, as `analysis.LengthDecayLR` would have kept it; the rate at which k3
    compounds; and the entropy law of arXiv 2505.22617. What the trace cannot answer is said, and the rest answered.

    Raises NothingToCompare for a trace without any step, InvalidOption, TraceNotFound, NewerTrace or DamagedTrace.
    """
    names = parse_pair(pair)
    database = opened(trace)
    source = database.sources[0]
    with progress("reading series", 1) as advance:
        found = read_series(database, pair=names)
        advance(1)
    if not found:
        raise NothingToCompare(
            f"{source.run}: has neither sequences nor logged values of any step; record a run with tim-trace record"
        )
    found = _chosen(found, steps)
    moved = {name: tuple(change_points(series)) for name, series in found.items()}
    onsets = onsets_of(moved, {name: series.kind for name, series in found.items()})
    schedule = schedule_of(found["length"]) if "length" in found else None
    axis = next(iter(found.values())).steps
    unanswered = _unanswered(found, pair)
    growth = growths(found.get("k3"))
    return Dynamics(
        trace=source.store.url,
        run=source.run,
        pair=pair,
        first_step=int(axis[0]),
        last_step=int(axis[-1]),
        num_steps=len(axis),
        says=sentences(moved, onsets, schedule, growth, len(axis)),
        series=tuple(_moved(series, moved[name]) for name, series in found.items()),
        onsets=onsets,
        lead_lag=lead_lags(found),
        schedule=schedule,
        growth=growth,
        entropy_law=entropy_law(found.get("reward"), found.get("entropy")),
        unanswered=unanswered,
    )


def _chosen(found: dict[str, Series], steps: str) -> dict[str, Series]:
    """The series over some of their steps, less those that have no value there."""
    axis = next(iter(found.values())).steps
    wanted = np.isin(axis, parse_steps(steps, [int(step) for step in axis]))
    cut = {name: series.at(wanted) for name, series in found.items()}
    return {name: series for name, series in cut.items() if series.known.any() or len(series.not_finite)}


def _moved(series: Series, found: tuple[ChangePoint, ...]) -> Moved:
    values = series.values[series.known]
    part = max(5, len(values) // 10)
    empty = np.full(1, np.nan)
    head, tail, whole = (each if len(each) else empty for each in (values[:part], values[-part:], values))
    return Moved(
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
        changes=found,
    )


_LACKING = {
    "reward": "no rewards: what the run learned, its spread within groups and the entropy law are open; record them with "
    "Recorder.add_sequences(reward=...)",
    "reward_std_within_groups": "no groups of two or more rewards: their spread is open; record group_ids",
    "k3_positive": "no advantages: the mismatch by their sign is open; record them with Recorder.add_sequences(advantage=...)",
    "grad_norm": "no grad norm was logged: record it with Recorder.add_metrics",
    "update_to_weight": "no optimizer statistics: tim-trace record takes them, or Recorder.add_optimizer",
    "policy_lag": "no policy versions of both sides: how far the policy ran ahead is open",
    "clip_share": "no loss with a clip was recorded, no advantages, or no logprobs inside of it: the clipped share is open; "
    "Recorder.add_loss records the loss",
    "changed_weights": "no weights were kept: record with --weights delta to see how much of them each update changes",
}
"""Series -> what is open without it."""


def _unanswered(found: dict[str, Series], pair: str) -> tuple[str, ...]:
    told = []
    if "k3" not in found:
        told.append(
            f"{pair} share no token: the mismatch and the rate at which it compounds are open; see tim-trace info"
        )
    told += [sentence for name, sentence in _LACKING.items() if name not in found]
    longest = max(int(series.known.sum()) for series in found.values())
    if longest < changes.FEWEST:
        told.append(
            f"{longest} step{'s' if longest > 1 else ''}: change points need {changes.FEWEST}, lags "
            f"{lead_lag.FEWEST}, rates and laws {laws.FEWEST}"
        )
    return tuple(told)
