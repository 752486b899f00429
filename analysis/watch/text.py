"""A watched run as text and as JSON."""

from __future__ import annotations

import shlex
from dataclasses import fields
from typing import Any

import numpy as np
from rich.text import Text

from ..dynamics.quantities import Series
from ..info import FINISHED, KILLED, LIVE, STOPPED, duration
from .lines import Paper, Section, fitted
from .spark import ASCII, BLOCKS, spark
from .watched import WAITING, FirstAlarm, Moved, Watched

COLUMNS = (
    "reward", "length", "k3", "p99_abs_d", "max_abs_d", "entropy", "grad_norm", "clip_share", "ess", "learning_rate",
)  # fmt: skip
"""Series of the table of the latest steps, the ones that a narrow terminal keeps first."""

_GOOD, _BAD, _DIM, _TITLE = "green", "bold red", "dim", "bold"
_STATES = {LIVE: _GOOD, FINISHED: _GOOD, WAITING: "yellow", KILLED: _BAD, STOPPED: _BAD}
_SHORTEST_SPARK = 8
_HIGH = 45
"""Lines from which a view can be airy."""


def watched_text(
    seen: Watched, *, width: int = 100, height: int | None = None, encoding: str = "utf-8", goes_on: bool = False
) -> Text:
    """Write what is seen for reading, in no line longer than `width` columns and, where it is given, `height` lines.

    Head, first alarms, changes, latest steps, the whole run in sparklines, what to do next. `encoding` is the terminal's:
    blocks become ASCII where it has none. `goes_on` says that another view will follow.
    """
    paper = Paper(width=width, encoding=encoding, is_tight=height is not None and height < _HIGH)
    sections = [
        _head(seen, paper),
        _alarms(seen, paper),
        _changes(seen, paper),
        _latest(seen, paper),
        _courses(seen, paper),
        Section(head=_next(seen, paper, goes_on, is_screen=height is not None)),
    ]
    return Text("\n").join(fitted(sections, paper, height))


def watched_json(seen: Watched) -> dict[str, Any]:
    """The same as JSON can say it: of the series the latest steps, and of each its extremes."""
    found = {
        field.name: getattr(seen, field.name)
        for field in fields(seen)
        if field.name not in ("series", "alarms", "moved")
    }
    return found | {
        "alarms": [_fields(alarm) for alarm in seen.alarms],
        "changes": [{"name": moved.name} | _fields(moved.change) for moved in seen.moved],
        "latest": [{"step": step} | {n: _value(s, step) for n, s in seen.series.items()} for step in _last_steps(seen)],
        "series": [_summary(series) for series in seen.series.values()],
    }


def _head(seen: Watched, paper: Paper) -> Section:
    state = seen.state.upper()
    if seen.exit_code is not None:
        state += f", the command ended with {seen.exit_code}"
    room = max(8, paper.width - len(state) - 2)
    name = paper.ending(seen.trace, room)
    facts = [f"steps {seen.num_steps:,}" + (f" ({seen.first_step} to {seen.last_step})" if seen.num_steps else "")]
    facts += [f"sequences {seen.num_sequences:,}", f"response tokens {seen.num_tokens:,}"]
    if seen.age_s is not None:
        facts.append(f"last record {duration(seen.age_s)} ago")
    if seen.steps_per_minute is not None:
        facts.append(f"{_number(seen.steps_per_minute)} steps a minute ({seen.rate_from})")
    head = [paper.line((name, _TITLE), "  ", (state, _STATES[seen.state]))]
    if seen.state != WAITING:
        head += [line for packed in _packed(facts, paper.width) for line in paper.wrapped(packed)]
    if seen.num_unread_steps:
        unread = f"still reading: {seen.num_unread_steps:,} earlier steps are missing from what is below"
        head += paper.wrapped(unread, style="yellow")
    return Section(head=head + [line for note in seen.notes for line in paper.wrapped(f"note: {note}", style="yellow")])


def _alarms(seen: Watched, paper: Paper) -> Section:
    if not seen.num_alarms:
        return Section(head=[])
    still = sum(alarm.still for alarm in seen.alarms)
    count = f"{len(seen.alarms)} of {seen.num_alarms} sounded, {still} of them at the end" if seen.alarms else ""
    head = [paper.line(("FIRST ALARMS", _TITLE), "  ", count or f"none of {seen.num_alarms} sounded")]
    return Section(head=head, blocks=[_alarm(alarm, seen, paper) for alarm in seen.alarms], least=3)


def _alarm(alarm: FirstAlarm, seen: Watched, paper: Paper) -> list[Text]:
    digits, until = len(str(seen.last_step or 0)), "still" if alarm.still else f"to {alarm.last_step}"
    first = [
        (f"{alarm.first_step:>{digits}}  ", _TITLE),
        (f"{until:<{max(5, digits + 3)}}  ", _BAD if alarm.still else _DIM),
    ]
    value = "" if alarm.first_value is None else f" ({_number(alarm.first_value)})"
    told = f"{alarm.who}: {alarm.metric} {alarm.condition}{value}: {alarm.says}; {alarm.definition}"
    return [paper.line(*first, told)] if paper.is_tight else paper.wrapped(told, first=first)


def _changes(seen: Watched, paper: Paper) -> Section:
    if not seen.moved:
        return Section(head=[])
    head = [paper.line(("CHANGES", _TITLE), "  at a step (95 % interval), shift or ramp")]
    return Section(head=head, blocks=[_change(moved, paper) for moved in seen.moved], least=1)


def _change(moved: Moved, paper: Paper) -> list[Text]:
    change = moved.change
    what = f"{moved.name}  {_number(change.before)} to {_number(change.after)}, {change.kind}"
    first = [(f"{change.step} ({change.low} to {change.high})  ", _TITLE)]
    return [paper.line(*first, what)] if paper.is_tight else paper.wrapped(what, first=first)


def _latest(seen: Watched, paper: Paper) -> Section:
    steps = _last_steps(seen)
    if not steps:
        return Section(head=[])
    cells = {"step": [str(step) for step in steps]}
    cells |= {name: [_cell(seen.series[name], step) for step in steps] for name in COLUMNS if name in seen.series}
    widths = {name: max(len(name), *(len(value) for value in values)) for name, values in cells.items()}
    chosen, used = ["step"], widths["step"]
    for name in list(cells)[1:]:
        if used + 2 + widths[name] <= paper.width:
            chosen.append(name)
            used += 2 + widths[name]
    told = "  the last one may still grow" if seen.state == LIVE else ""
    head = [
        paper.line(("LATEST STEPS", _TITLE), told),
        paper.line(("  ".join(f"{name:>{widths[name]}}" for name in chosen), _DIM)),
    ]
    rows = [
        paper.line(
            *_joined([(f"{cells[name][place]:>{widths[name]}}", _emphasis(cells[name][place])) for name in chosen])
        )
        for place in range(len(steps))
    ]
    return Section(head=head, blocks=[[row] for row in rows], least=3, keeps_last=True)


def _courses(seen: Watched, paper: Paper) -> Section:
    """A line a series: its name, its course, and what its ends mean."""
    chosen = [
        seen.series[name]
        for name in (*COLUMNS, *(name for name in seen.series if name not in COLUMNS))
        if name in seen.series
    ]
    chosen = [each for each in chosen if each.known.any() or len(each.not_finite)]
    if not chosen:
        return Section(head=[])
    names = [each.name + _scale(each) for each in chosen]
    ends = [_ends(each) for each in chosen]
    widths = [max(len(name), *(len(row[place]) for row in ends)) for place, name in enumerate(_ENDS)]
    num_ends = 3 if paper.width >= 72 else 1
    taken = sum(widths[:num_ends]) + 2 * num_ends
    name_width = min(max(map(len, names)), max(8, paper.width - taken - 2 - _SHORTEST_SPARK), max(12, paper.width // 4))
    spark_width = max(1, paper.width - taken - name_width - 1)
    characters = BLOCKS if paper.can(BLOCKS) else ASCII
    spark_width = min(spark_width, max(len(each.steps) for each in chosen))
    legend = [f"{name:>{widths[place]}}" for place, name in enumerate(_ENDS[:num_ends])]
    title = paper.cut(f"WHOLE RUN  steps {chosen[0].steps[0]} to {chosen[0].steps[-1]}", name_width + 1 + spark_width)
    head = [paper.line((f"{title:<{name_width + 1 + spark_width}}", _TITLE), ("  " + "  ".join(legend), _DIM))]
    blocks = []
    for each, name, row in zip(chosen, names, ends, strict=True):
        drawn = f"{spark(each, spark_width, characters):<{spark_width}}"
        told = "".join(f"  {value:>{widths[place]}}" for place, value in enumerate(row[:num_ends]))
        style = _BAD if len(each.not_finite) else "cyan"
        blocks.append([paper.line(f"{paper.cut(name, name_width):<{name_width}} ", (drawn, style), told)])
    return Section(head=head, blocks=blocks, least=4)


_ENDS = ("last", "smallest", "largest")


def _ends(series: Series) -> tuple[str, str, str]:
    known = series.values[series.known]
    last = _cell(series, int(max([*series.steps[series.known][-1:], *series.not_finite[-1:]])))
    return (last, _number(known.min()), _number(known.max())) if len(known) else (last, "", "")


def _scale(series: Series) -> str:
    return "" if series.scale == "linear" else f" ({series.scale})"


def _next(seen: Watched, paper: Paper, goes_on: bool, *, is_screen: bool) -> list[Text]:
    if goes_on:
        return [paper.line(("Ctrl-C ends this view and not the recording", _DIM))]
    verb = "watch" if seen.state == WAITING else "diagnose" if seen.num_steps else "info"
    command = paper.shown(f"tim-trace {verb} {shlex.quote(seen.trace)}")
    ended = "The recording has ended: " + seen.state if seen.is_over else "The recording goes on"
    if seen.state == WAITING:
        ended = "Nothing is recorded yet"
    # A command is copied whole: the terminal may break it, and this does not.
    return [*paper.wrapped(f"{ended}. Next:"), paper.line((command, _TITLE)) if is_screen else Text(command, _TITLE)]


def _packed(facts: list[str], width: int) -> list[str]:
    """Facts in as few lines as hold them."""
    lines: list[str] = []
    for fact in facts:
        if lines and len(lines[-1]) + 3 + len(fact) <= width:
            lines[-1] += "   " + fact
        else:
            lines.append(fact)
    return lines


def _joined(cells: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [part for place, cell in enumerate(cells) for part in ((("  ", ""), cell) if place else (cell,))]


def _last_steps(seen: Watched) -> list[int]:
    every = next((series.steps for series in seen.series.values()), np.empty(0, np.int64))
    return [int(step) for step in every[-seen.num_latest :]]


def _value(series: Series, step: int) -> float | None:
    """None where nothing was recorded; NaN where no number was."""
    if step in series.not_finite:
        return float("nan")
    value = float(series.values[np.searchsorted(series.steps, step)])
    return value if np.isfinite(value) else None


def _cell(series: Series, step: int) -> str:
    value = _value(series, step)
    return "" if value is None else _number(value)


def _emphasis(cell: str) -> str:
    return _BAD if cell.strip() == _NOT_FINITE else ""


_NOT_FINITE = "NaN/inf"


def _number(value: float) -> str:
    """Three digits, and whole numbers below a million as they are."""
    if not np.isfinite(value):
        return _NOT_FINITE
    return f"{value:.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in fields(value)}


def _summary(series: Series) -> dict[str, Any]:
    known = series.values[series.known]
    last = float(known[-1]) if len(known) else None
    smallest, largest = (float(known.min()), float(known.max())) if len(known) else (None, None)
    return {
        "name": series.name, "kind": series.kind, "scale": series.scale, "source": series.source, "num_steps": len(known),
        "last": last, "smallest": smallest, "largest": largest, "not_finite": series.not_finite.tolist(),
    }  # fmt: skip
