"""Charts of a run by step: one chart per series, all over the same step axis."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..facts.series import KINDS, LOG, Series
from . import chart, text
from .chart import Band, Line, LineChart, Mark
from .commands import query_of_metric, query_of_series
from .subject import Subject
from .terms import EVALUATION, SERIES, Term

_OF_MISMATCH = ("k3", "p99_abs_d", "max_abs_d", "ess")
_MOST_MARKS = 8


def run_charts(subjects: Sequence[Subject]) -> list[LineChart]:
    """Return one chart per series that varies in at least one run. A chart includes replays and all runs; changes are marked
    for the first run only."""
    found = [_chart(name, term, subjects) for name, term in SERIES.items()]
    charts = [one for one in found if one is not None]
    outcome = _evaluation(subjects)
    if outcome is not None:
        place = next((i + 1 for i, one in enumerate(charts) if one.key == "reward"), 0)
        charts.insert(place, outcome)
    return charts


def constants(subject: Subject) -> dict[str, float]:
    """Return a mapping from the name of each series that is constant throughout the run to its value."""
    return {
        name: float(values[0])
        for name in SERIES
        if name in subject.series and len(values := _known(subject.series[name])) and np.all(values == values[0])
    }


def _chart(name: str, term: Term, subjects: Sequence[Subject]) -> LineChart | None:
    lines = [
        Line(name=subject.name, x=series.steps, y=series.values)
        for subject in subjects
        if (series := subject.series.get(name)) is not None and len(_known(series))
    ]
    if not lines or all(_is_constant(line.y) for line in lines):
        return None
    values = np.concatenate([line.y[np.isfinite(line.y)] for line in lines])
    is_log = KINDS[name][1] == LOG and values.min() > 0
    if name in _OF_MISMATCH:
        lines += _arms(name, subjects, is_log)
    first = subjects[0]
    return LineChart(
        key=name, title=term.title, unit=term.unit, note=f"{term.note} {_source(name, subjects)}".strip(),
        sql=query_of_series(name, first), lines=tuple(lines), x_label="step",
        y_scale=chart.LOG if is_log else chart.LINEAR,
        marks=_marks(name, first), remark=text.not_finite(first.series[name].not_finite.tolist()) if name in first.series else "", bands=_published_k3(first) if name == "k3" else (),
    )  # fmt: skip


def _known(series: Series) -> np.ndarray:
    return np.asarray(series.values[series.known])


def _is_constant(values: np.ndarray) -> bool:
    known = values[np.isfinite(values)]
    return bool(np.all(known == known[0])) if len(known) else True


def _source(name: str, subjects: Sequence[Subject]) -> str:
    series = subjects[0].series.get(name)
    return f"Here: {series.source}." if series is not None and series.source else ""


def _arms(name: str, subjects: Sequence[Subject], is_log: bool) -> list[Line]:
    """Return one line per replay: the mismatch if the replay replaces pass a. On a logarithmic axis, a mismatch of 0
    becomes NaN."""
    many = len(subjects) > 1
    found = []
    for subject in subjects:
        for arm, columns in subject.arms.items():
            for column in columns:
                if column.name == name:
                    y = np.where(column.values > 0, column.values, np.nan) if is_log else column.values
                    found.append(Line(name=f"{subject.name} {arm}" if many else arm, x=column.steps, y=y, is_side=True))
    return found


def _marks(name: str, subject: Subject) -> tuple[Mark, ...]:
    """Return the largest changes of the series."""
    moved = next((one for one in subject.dynamics.series if one.name == name), None) if subject.dynamics else None
    if moved is None:
        return ()
    largest = sorted(moved.changes, key=lambda change: -abs(change.size_in_sd))[:_MOST_MARKS]
    return tuple(
        Mark(
            x=change.step, low=change.low, high=change.high,
            text=text.change(change),
        )
        for change in sorted(largest, key=lambda change: change.step)
    )  # fmt: skip


def _published_k3(subject: Subject) -> tuple[Band, ...]:
    """Return a band for the published range of k3 in healthy runs with the dtypes of the subject's passes."""
    is_mixture = any("moe" in str(row["contract_json"]).lower() for row in subject.contracts)
    healthy = [
        figure
        for figure in (each.figure for each in (subject.diagnosis.figures if subject.diagnosis else ()) if each.fits)
        if figure.metric == "k3" and not figure.is_fault and figure.is_mixture == is_mixture
    ]
    low = min((figure.low for figure in healthy), default=0.0)
    high = max((figure.high for figure in healthy), default=0.0)
    if not low < high:
        return ()
    return (Band(low=low, high=high, text=text.published(low, high, [figure.source for figure in healthy])),)


def _evaluation(subjects: Sequence[Subject]) -> LineChart | None:
    found = [(subject, subject.evaluation) for subject in subjects if subject.evaluation is not None]
    if not found:
        return None
    lines = [Line(name=subject.name, x=logged.steps, y=logged.values) for subject, logged in found]
    first, name = found[0][0], found[0][1].name
    return LineChart(
        key="evaluation", title=name, unit=EVALUATION.unit, note=EVALUATION.note, sql=query_of_metric(name, first, 0),
        lines=tuple(lines), x_label="step",
    )  # fmt: skip
