from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, OverflowMethod, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from ..alarms.reading import AlarmReading, AlarmReadings
from ..alarms.text import fired, value_text
from ..facts.series import Series
from ..info import FINISHED, KILLED, LIVE, STOPPED, duration
from ..rows import printable
from .watched import ASCII, BLOCKS, COLUMNS, WAITING, Watched, spark, value_at

_GOOD, _BAD, _DIM, _TITLE, _NOTE = "green", "bold red", "dim", "bold", "yellow"
_STATES = {LIVE: _GOOD, FINISHED: _GOOD, WAITING: _NOTE, KILLED: _BAD, STOPPED: _BAD}
_SHORTEST_SPARK = 8
_HIGH = 45
"""Minimum terminal height (lines) at which empty lines separate the sections."""
_LEAST = {"alarms": 3, "changes": 1, "latest": 3, "courses": 4}
"""Section -> minimum number of rows. Sections are cut below it only once every section is down to its minimum."""
_NOT_FINITE = "NaN/inf"


class WatchedView:
    def __init__(self, seen: Watched, *, is_screen: bool = False):
        self.seen, self._is_screen = seen, is_screen
        order = {name: place for place, name in enumerate(COLUMNS)}
        self._series = sorted(
            (one for one in seen.series.values() if one.known.any() or len(one.not_finite)),
            key=lambda one: order.get(one.name, len(order)),
        )

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        self._console, self._options, self._width = console, options, options.max_width
        self._height = console.height if self._is_screen else None
        yield from self.drawn(self.fitted())

    @property
    def rows(self) -> dict[str, int]:
        seen = self.seen
        return {
            "alarms": len(seen.alarms.raised), "changes": len(seen.changes), "latest": len(seen.shown_steps),
            "courses": len(self._series),
        }  # fmt: skip

    def fitted(self) -> dict[str, int]:
        height, whole, rows = self._height, self.rows, self.rows
        if height is None:
            return whole
        # Number of lines if all rows are cut. Every section except `latest` then has a line that counts its cut rows.
        empty = sum(
            len(self._console.render_lines(part, self._options)) for part in self.drawn(dict.fromkeys(whole, 0))
        )

        def num_lines() -> int:
            told = sum(0 < rows[name] == whole[name] for name in rows if name != "latest")
            return empty + sum(rows.values()) - told

        while num_lines() > height and (left := [name for name in rows if rows[name]]):
            rows[max(left, key=lambda name: (max(rows[name] - _LEAST[name], 0), rows[name]))] -= 1
        return rows

    def drawn(self, rows: dict[str, int]) -> Iterator[RenderableType]:
        sections: list[RenderableType | None] = [
            self._head(), self._alarms(rows["alarms"]), self._changes(rows["changes"]), self._latest(rows["latest"]),
            self._courses(rows["courses"]), self._next(),
        ]  # fmt: skip
        for place, section in enumerate(section for section in sections if section is not None):
            if place and (self._height is None or self._height >= _HIGH):
                yield Text()
            yield section

    def _text(self, text: str, style: str = "", *, no_wrap: bool = False, overflow: OverflowMethod = "fold") -> Text:
        text = printable(text)
        if not self._can(text):
            text = text.encode("ascii", "backslashreplace").decode()
        return Text(text, style, no_wrap=no_wrap, overflow=overflow)

    def _can(self, characters: str) -> bool:
        try:
            characters.encode(self._console.encoding)
        except (UnicodeEncodeError, LookupError):
            return False
        return True

    def _row(self, text: str) -> Text:
        return self._text(text, no_wrap=self._height is not None, overflow="crop" if self._height else "fold")

    def _head(self) -> RenderableType:
        seen = self.seen
        state = seen.state.upper()
        if seen.exit_code is not None:
            state += f", the command exited with {seen.exit_code}"
        name = _ending(self._text(seen.trace).plain, max(8, self._width - len(state) - 2))
        facts = [f"steps {seen.num_steps:,}" + (f" ({seen.first_step} to {seen.last_step})" if seen.num_steps else "")]
        facts += [f"sequences {seen.num_sequences:,}", f"response tokens {seen.num_tokens:,}"]
        if seen.age_s is not None:
            facts.append(f"last record {duration(seen.age_s)} ago")
        if seen.steps_per_minute is not None:
            facts.append(f"{_number(seen.steps_per_minute)} steps per minute ({seen.rate_from})")
        parts: list[RenderableType] = [Text.assemble((name, _TITLE), "  ", (state, _STATES[seen.state]))]
        if seen.state != WAITING:
            parts += map(self._text, _packed(facts, self._width))
        if seen.num_unread_steps:
            unread = f"still reading; {seen.num_unread_steps:,} earlier steps are not shown yet"
            parts.append(self._text(unread, _NOTE))
        return Group(*parts, *(self._text(f"note: {note}", _NOTE) for note in seen.notes))

    def _alarms(self, num_rows: int) -> RenderableType | None:
        seen = self.seen
        judged, raised = seen.alarms.judged, seen.alarms.raised
        if not judged:
            return None
        title = self._title("FIRST ALERTS", alarm_count(seen.alarms))
        return Group(title, alarm_table(raised[:num_rows], self._row), *self._more(len(raised) - num_rows))

    def _changes(self, num_rows: int) -> RenderableType | None:
        changes = self.seen.changes
        if not changes:
            return None
        table = _table(2)
        for each in changes[:num_rows]:
            change = each.change
            line = f"{each.name}  {_number(change.before)} to {_number(change.after)}, {change.kind}"
            table.add_row(Text(f"{change.step} ({change.low}-{change.high})", _TITLE), self._row(line))
        title = self._title("CHANGES", "step (95% CI), shift or ramp")
        return Group(title, table, *self._more(len(changes) - num_rows))

    def _latest(self, num_rows: int) -> RenderableType | None:
        seen = self.seen
        if not seen.shown_steps:
            return None
        steps = seen.shown_steps[len(seen.shown_steps) - num_rows :]
        table, used = _table(0), 0
        columns = []
        for name in ("step", *(name for name in COLUMNS if name in seen.series)):
            cells = [str(step) if name == "step" else _cell(seen.series[name], step) for step in steps]
            used += max(map(len, (name, *cells))) + 2
            if used - 2 > self._width:
                break
            table.add_column(Text(name, _DIM), justify="right", no_wrap=True, overflow="crop")
            columns.append([Text(cell, _BAD if cell == _NOT_FINITE else "") for cell in cells])
        for row in zip(*columns, strict=True):
            table.add_row(*row)
        table.show_header = True
        return Group(
            self._title("LATEST STEPS", "the last step may be incomplete" if seen.state == LIVE else ""), table
        )

    def _courses(self, num_rows: int) -> RenderableType | None:
        if not self._series:
            return None
        characters = BLOCKS if self._can(BLOCKS) else ASCII
        ends = _ENDS if self._width >= 72 else _ENDS[:1]
        steps = self._series[0].steps
        table = _table(0)
        table.show_header = True
        table.add_column(
            "WHOLE RUN", max_width=self._width * 9 // 20 if self._width >= 72 else 12, no_wrap=True, overflow="crop"
        )
        table.add_column(f"steps {steps[0]} to {steps[-1]}", overflow="crop")
        for name in ends:
            table.add_column(Text(name, _DIM), justify="right", no_wrap=True, overflow="crop")
        for one in self._series[:num_rows]:
            name = one.name if one.scale == "linear" else f"{one.name} ({one.scale})"
            table.add_row(name, _Course(one, characters), *_ends(one)[: len(ends)])
        return Group(table, *self._more(len(self._series) - num_rows))

    def _title(self, title: str, rest: str) -> Text:
        return Text.assemble((title, _TITLE), "  ", rest, no_wrap=True, overflow="crop")

    def _more(self, number: int) -> Sequence[Text]:
        return [Text(f"... and {number} more", _DIM, no_wrap=True, overflow="crop")] if number else []

    def _next(self) -> RenderableType:
        seen = self.seen
        if self._height is not None and not seen.is_over:
            return Text("Ctrl-C closes this view; recording continues", _DIM, no_wrap=True, overflow="crop")
        verb = "watch" if seen.state == WAITING else "diagnose" if seen.num_steps else "info"
        ended = "Recording ended: " + seen.state if seen.is_over else "Still recording"
        if seen.state == WAITING:
            ended = "Nothing recorded yet"
        # The command is never wrapped, so that it can be copied as one line.
        command = self._text(f"tim-trace {verb} {shlex.quote(seen.trace)}", _TITLE, no_wrap=True, overflow="ignore")
        return Group(self._text(f"{ended}. Next:"), command)


def alarm_count(alarms: AlarmReadings) -> str:
    still = sum(reading.still for reading in alarms.raised)
    return fired(len(alarms.raised), len(alarms.judged)) + (f", {still} still firing" if alarms.raised else "")


def alarm_table(raised: Sequence[AlarmReading], row: Callable[[str], Text] = Text) -> Table:
    """Return one row per alert: the first step, the last step (or `still` if the alert still fires), and the rule with
    its source."""
    table = _table(3)
    for reading in raised:
        alarm = reading.alarm
        value = "" if reading.own is None else f" ({value_text(reading, _number)})"
        until = Text("still", _BAD) if reading.still else Text(f"to {reading.last_step}", _DIM)
        line = f"{alarm.who}: {alarm.metric} {alarm.condition}{value}: {alarm.summary}; {alarm.definition}"
        table.add_row(Text(str(reading.first_step), _TITLE), until, row(line))
    return table


class _Course:
    def __init__(self, series: Series, characters: str):
        self._series, self._characters = series, characters

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(_SHORTEST_SPARK, len(self._series.steps)), len(self._series.steps))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        drawn = spark(self._series, options.max_width, self._characters)
        yield Text(drawn, _BAD if len(self._series.not_finite) else "cyan", no_wrap=True, overflow="crop")


_ENDS = ("last", "smallest", "largest")


def _ends(series: Series) -> tuple[str, str, str]:
    known = series.values[series.known]
    last = _cell(series, int(max([*series.steps[series.known][-1:], *series.not_finite[-1:]])))
    return (last, _number(known.min()), _number(known.max())) if len(known) else (last, "", "")


def _table(num_columns: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False, header_style=_TITLE)
    for place in range(num_columns):
        is_last = place == num_columns - 1
        table.add_column(no_wrap=not is_last, justify="left" if place or is_last else "right", overflow="fold")
    return table


def _packed(facts: Sequence[str], width: int) -> list[str]:
    lines = [facts[0]]
    for fact in facts[1:]:
        if len(lines[-1]) + 3 + len(fact) <= width:
            lines[-1] += "   " + fact
        else:
            lines.append(fact)
    return lines


def _ending(text: str, width: int) -> str:
    while cell_len(text) > width:
        text = "~" + text[2:] if len(text) > 1 else ""
    return text


def _cell(series: Series, step: int) -> str:
    value = value_at(series, step)
    return "" if value is None else _number(value)


def _number(value: float) -> str:
    if not np.isfinite(value):
        return _NOT_FINITE
    return f"{value:.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"
