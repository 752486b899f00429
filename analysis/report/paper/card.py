"""Draw a report's verdict as one image that can be read in a chat's preview."""

from __future__ import annotations

import os
import textwrap
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D

from ....tracer.whole_file import whole_file
from ...facts.series import FLAT
from ..answers import BAD, GOOD, NOTICE, OPEN, SIGNS
from ..chart import MARK, LineChart, Mark
from ..contents import Report
from ..targets import explained, local
from .figure import DPI, PLAIN, draw_lines, one_line, plain, set_ticks

SIZE = (1200, 630)
"""Width and height (pixels). Chats and social networks show an image of this size uncropped in a preview."""
_INK, _SOFT, _RULE = "#1B1F24", "#57606A", "#D0D7DE"
_COLOURS = {GOOD: "#00724F", NOTICE: "#8A5A00", BAD: "#B3400A", OPEN: _SOFT}
_LABELS = {"validity": "valid", "factor": "cause", "size": "size", "objective": "objective", "fall": "collapse"}
_LEFT, _RIGHT, _LABEL_WIDTH, _MIDDLE = 40, 1160, 120, 640
_PIXEL = 72 / DPI
_PANELS = (("k3", "p99_abs_d", "max_abs_d"), ("reward", "evaluation"))
_MOST_CHARACTERS = 600
_MOST_RUNS = 3


def write_card(made: Report, path: str | os.PathLike[str]) -> None:
    """Write the card as a PNG file. Raises StorageError."""
    with explained(path), whole_file(local(path)) as temporary:
        card(made).savefig(temporary, format="png", dpi=DPI, metadata={"Software": None})


def card(made: Report) -> Figure:
    """Draw the run names, the first run's headline and answers, and charts of mismatch and reward with the collapse
    marked."""
    with PLAIN.settings():
        figure = Figure(figsize=(SIZE[0] / DPI, SIZE[1] / DPI), facecolor="white")
        write = partial(_write, figure, FigureCanvasAgg(figure).get_renderer())
        write(", ".join(subject.name for subject in made.subjects), _LEFT, 34, 24, _RIGHT - _LEFT - 130, 1, color=_SOFT)
        write("tim-trace", _RIGHT, 34, 24, 120, 1, color=_SOFT, ha="right")
        write(made.verdicts[0].headline, _LEFT, 74, 27, _RIGHT - _LEFT, 3, color=_INK, weight="bold")
        rule = [_LEFT / SIZE[0], _RIGHT / SIZE[0]], [1 - 196 / SIZE[1]] * 2
        figure.add_artist(Line2D(*rule, color=_RULE, linewidth=0.5))
        charts = _charts(made)
        room = (_MIDDLE if charts else _RIGHT) - _LEFT - _LABEL_WIDTH - 26
        for place, answer in enumerate(made.verdicts[0].answers):
            top, colour, x = 214 + 80 * place, _COLOURS[answer.severity], _LEFT + _LABEL_WIDTH
            write(_LABELS[answer.question], _LEFT, top + 2, 20, _LABEL_WIDTH, 1, color=_SOFT)
            write(SIGNS[answer.severity], x, top, 22, 26, 1, color=colour, weight="bold")
            write(answer.short, x + 26, top, 22, room, 3, color=colour if answer.severity == BAD else _INK)
        note, marks = _marked(made, charts)
        for place, chart in enumerate(charts):
            box = _box(746, 232 + place * 372 / len(charts), _RIGHT - 746, 372 / len(charts) - 46)
            axes = figure.add_axes(box, sharex=figure.axes[0] if place else None)
            _draw(axes, chart, marks[place], note if place == len(charts) - 1 else None)
        return figure


def _write(
    figure: Figure, renderer: Any, text: str, x: float, y: float, size: float, width: float, most_lines: int, **how: Any
) -> None:
    """Write text, wrapped to a width. Sizes and positions are in pixels from the upper left corner."""
    font = FontProperties(family=[PLAIN.font], size=size * _PIXEL, weight=how.get("weight", "normal"))

    def fits(part: str) -> bool:
        return bool(renderer.get_text_width_height_descent(part, font, False)[0] <= width)

    for line in _lines(one_line(text[:_MOST_CHARACTERS], _MOST_CHARACTERS), most_lines, fits):
        at = (x / SIZE[0], 1 - y / SIZE[1])
        figure.text(*at, line, fontproperties=font, va="top", parse_math=False, **how)
        y += size * 1.14


def _lines(text: str, most: int, fits: Callable[[str], bool]) -> list[str]:
    """Break text into at most `most` lines that fit. Overlong words are split, and excess text is replaced by `...`."""

    def broken(width: int) -> list[str]:
        lines = textwrap.wrap(text, width, break_on_hyphens=False)
        return lines if len(lines) <= most else [*lines[: most - 1], f"{lines[most - 1][: width - 3]}..."]

    widths = range(4, len(text) + 1)
    num_fitting = bisect_left(widths, True, key=lambda width: not all(map(fits, broken(width))))
    return broken(3 + num_fitting)


def _box(x: float, y: float, width: float, height: float) -> tuple[float, float, float, float]:
    return x / SIZE[0], 1 - (y + height) / SIZE[1], width / SIZE[0], height / SIZE[1]


def _charts(made: Report) -> Sequence[LineChart]:
    found = {chart.key: chart for chart in made.run}
    wanted = [next((found[key] for key in keys if key in found), None) for keys in _PANELS]
    chosen = [chart for chart in wanted if chart is not None]
    chosen += [chart for chart in made.run if chart not in chosen][: 2 - len(chosen)]
    runs = {subject.name for subject in made.subjects[:_MOST_RUNS]}
    return [replace(chart, lines=tuple(line for line in chart.lines if line.name in runs)) for chart in chosen]


def _marked(made: Report, charts: Sequence[LineChart]) -> tuple[str, list[tuple[Mark, ...]]]:
    """Return a note that explains the vertical lines, and the vertical lines of each chart.

    They mark the collapse or, if there is none, the changes in the chart's own series.
    """
    attribution = made.subjects[0].attribution
    if attribution is not None and (fall := attribution.fall) is not None:
        low, high = fall.interval
        told = f"vertical line: {'learning stalls' if fall.kind == FLAT else 'collapse'} at step {fall.step}"
        return told, [(Mark(x=fall.step, low=low, high=high, text=""),)] * len(charts)
    return "vertical lines: changes" if any(chart.marks for chart in charts) else "", [chart.marks for chart in charts]


def _draw(axes: Axes, chart: LineChart, marks: Sequence[Mark], note: str | None) -> None:
    """Draw a chart. The note and the step labels are drawn only if `note` is not None."""
    handles = draw_lines(axes, replace(chart, marks=(), bands=()))
    for mark in marks:
        axes.axvspan(mark.low, mark.high, facecolor=MARK, alpha=0.12, linewidth=0)
        axes.axvline(mark.x, color=MARK, linestyle="dashed", linewidth=0.9)
    axes.set_title(plain(f"{chart.title}{f', {chart.unit}' if chart.unit else ''}", 40), fontsize=20 * _PIXEL, pad=4)
    set_ticks(axes.xaxis, most=5, integer=True)
    set_ticks(axes.yaxis, most=4)
    axes.tick_params(labelsize=17 * _PIXEL, labelbottom=note is not None)
    if note is not None:
        axes.set_xlabel(f"step{f' ({note})' if note else ''}", fontsize=17 * _PIXEL, color=_SOFT)
    if len(handles) > 1 and axes is axes.figure.axes[0]:
        names = [f" {plain(name, 20)}" for name in handles]  # matplotlib omits names that begin with _
        axes.legend(list(handles.values()), names, fontsize=16 * _PIXEL, loc="best")
