"""How a run changed, and what changed first."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

import numpy as np

from ...schemas.errors import NothingToCompare, option
from ...schemas.steps import ALL_STEPS
from ...tracer.progress import Progress, no_progress
from ..statement import Statement
from ..trace.database import Database, opened
from ..trace.pairs import parse_pair
from ..trace.samples import tell_sampled
from . import changes, laws, lead_lag
from .changes import ChangePoint
from .laws import entropy_law, growths
from .lead_lag import lead_lags
from .motion import Dynamics, SeriesSummary
from .onsets import onsets_of
from .quantities import Series
from .schedule import schedule_of
from .series import read_series
from .summary import summarise
from .timeline import read_changes, read_outcomes


def dynamics(
    trace: str | os.PathLike[str] | Database,
    *,
    pair: str = "train:rollout",
    steps: str = ALL_STEPS,
    progress: Progress = no_progress,
) -> Dynamics:
    """Say how a run changed: when each series changed, which changed first, and which series lead.

    Series are those of `series.read_series`, on the scales of `quantities.KINDS`; `steps` (3:80, :100, 2:200:2) takes a part
    of the run. Change points are those of `changes.change_points`, each with a 95 % interval: an order of two onsets
    whose intervals overlap is not decided. Then correlations over lags; the surge of the response length and the
    learning-rate schedule of arXiv 2602.01826, as a training would have kept it; the rate at which k3
    compounds; and the entropy law of arXiv 2505.22617. What the trace cannot answer is listed, and the rest answered. The
    onset of a fall is the one that `attribute` reports.

    Raises NothingToCompare for a trace without any step, InvalidOption, TraceNotFound, NewerTrace or DamagedTrace.
    """
    names = parse_pair(pair)
    database = opened(trace, steps)
    tell_sampled(database, names)
    source = database.sources[0]
    with database.telling(progress):
        series = read_series(database, pair=names)
    if not series and database.kept_steps:
        raise NothingToCompare(f"{source.run}: {option('steps', steps)} names steps without any series")
    if not series:
        raise NothingToCompare(
            f"{source.run}: has neither sequences nor logged values of any step; record a run with tim-trace record"
        )
    with database.telling(progress):
        changes_of, fall = read_changes(database, names), read_outcomes(database, names).fall
    onsets = onsets_of(changes_of, {name: one.kind for name, one in series.items()})
    schedule = schedule_of(series["length"]) if "length" in series else None
    axis = next(iter(series.values())).steps
    growth = growths(series.get("k3"), changes_of.get("k3", ()))
    return Dynamics(
        trace=source.store.url,
        run=source.run,
        pair=pair,
        first_step=int(axis[0]),
        last_step=int(axis[-1]),
        num_steps=len(axis),
        summary_codes=tuple(summarise(changes_of, onsets, fall, schedule, growth, len(axis))),
        fall=fall,
        series=tuple(_summary(one, changes_of[name]) for name, one in series.items()),
        onsets=onsets,
        lead_lag=lead_lags(series),
        schedule=schedule,
        growth=growth,
        entropy_law=entropy_law(series.get("reward"), series.get("entropy")),
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
"""Series without which a part of the answer is open."""


def _unanswered(series: Mapping[str, Series], pair: str) -> Iterator[Statement]:
    if "k3" not in series:
        yield Statement(code="no_mismatch", values={"pair": pair})
    yield from (Statement(code=f"no_{name}") for name in _NEEDED if name not in series)
    longest = max(int(one.known.sum()) for one in series.values())
    if longest < changes.FEWEST:
        least = {"changes": changes.FEWEST, "lags": lead_lag.FEWEST, "laws": laws.FEWEST}
        yield Statement(code="too_short", values={"num_steps": longest, **least})
