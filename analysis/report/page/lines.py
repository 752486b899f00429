"""Lines as figures: the series of a run one under the other, and others alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from bokeh.models import (
    BoxAnnotation,
    ColumnDataSource,
    CustomJS,
    CustomJSTickFormatter,
    HoverTool,
    Range1d,
    ResetTool,
    Span,
)
from bokeh.plotting import figure

from ..chart import Line, Lines
from ..colours import BAND, COLOURS, MARK
from .plain import CLICK, HOVER, LEFT, plain

_DASHES = ("dashed", "dotted", "dotdash", "dashdot")
"""Of lines that stand beside others: not told apart by colour alone."""
_LABELS = 22
"""Pixels of the step labels, which only the last figure has."""
_NEAR_ONE = 1e-5
"""Distance from 1 below which a share is labelled by that distance: its digits would push the frame out of line."""
_DISTANCE = (
    "return tick === 1 ? '1' : (tick < 1 ? '1 - ' : '1 + ') + Number(Math.abs(1 - tick).toPrecision(3)).toExponential()"
)
_FEW = 40
"""Points of a line up to which each is marked."""


def stacked(charts: Iterable[Lines]) -> list[figure]:
    """One figure a series, over one axis of steps that they zoom together; the page draws the hovered and the chosen step."""
    charts = list(charts)
    if not charts:
        return []
    ends = [(line.x.min(), line.x.max()) for one in charts for line in one.lines if len(line.x)]
    low, high = float(min(low for low, _ in ends)), float(max(high for _, high in ends))
    room = max((high - low) * 0.015, 0.5)
    steps = Range1d(low - room, high + room, bounds=(low - 2 * room, high + 2 * room))
    plots = [_of_series(one, steps) for one in charts]
    for plot in plots[:-1]:
        plot.xaxis.major_label_text_font_size = "0px"
        plot.xaxis.major_tick_line_color = None
    plots[-1].height += _LABELS
    return plots


def lines(one: Lines) -> figure:
    plot = figure(
        name=one.key, height=260, sizing_mode="stretch_width", x_axis_type=one.x_scale, y_axis_type=one.y_scale,
        toolbar_location=None, tools="", x_axis_label=one.x_label, min_border_left=LEFT,
    )  # fmt: skip
    _mark(plot, one)
    for place, line in enumerate(one.lines):
        _draw(plot, line, place, name=f"{one.key}/{place}", legend_label=line.name)
    plot.add_tools(
        HoverTool(tooltips=[(one.x_label, "@x{0.[000]}"), ("", "@y{0.[00000]a} " + one.unit), ("", "$name")])
    )
    if one.x_label == "step":
        plot.js_on_event("tap", CustomJS(code=CLICK))
        plot.add_layout(Span(name="chosen", dimension="height", line_color="#E69F00", line_width=2, visible=False))
    return plain(plot)


def _of_series(one: Lines, steps: Range1d) -> figure:
    plot = figure(
        name=one.key, height=100, sizing_mode="stretch_width", x_range=steps, y_axis_type=one.y_scale, toolbar_location=None,
        tools="xpan,xwheel_zoom,xbox_zoom", active_drag="xbox_zoom", active_scroll=None, min_border_left=LEFT,
        min_border_right=12, lod_threshold=None,
    )  # fmt: skip
    plot.add_tools(ResetTool())
    _mark(plot, one)
    if _is_near_one(one):
        plot.yaxis.formatter = CustomJSTickFormatter(code=_DISTANCE)
    for place, line in enumerate(one.lines):
        _draw(plot, line, place, name=f"{one.key}/{place}")
    plot.js_on_event("mousemove", CustomJS(code=HOVER))
    plot.js_on_event("tap", CustomJS(code=CLICK))
    plot.js_on_event("doubletap", CustomJS(code="timTrace.whole()"))
    return plain(plot)


def _is_near_one(one: Lines) -> bool:
    values = np.concatenate([line.y[np.isfinite(line.y)] for line in one.lines])
    return bool(len(values)) and bool(np.all(np.abs(1 - values) < _NEAR_ONE))


def _mark(plot: figure, one: Lines) -> None:
    for band in one.bands:
        plot.add_layout(
            BoxAnnotation(bottom=band.low, top=band.high, fill_color=BAND, fill_alpha=0.13, line_color=None)
        )
    for mark in one.marks:
        if mark.high > mark.low:
            plot.add_layout(
                BoxAnnotation(left=mark.low, right=mark.high, fill_color=MARK, fill_alpha=0.06, line_color=None)
            )
        plot.add_layout(Span(location=mark.x, dimension="height", line_color=MARK, line_dash="dashed", line_width=1.5))


def _draw(plot: figure, line: Line, place: int, name: str, **more: Any) -> None:
    source = ColumnDataSource({"x": line.x.astype(np.float64), "y": line.y.astype(np.float64)}, name=name)
    colour = COLOURS[place % len(COLOURS)]
    style = {"line_width": 1.3, "line_dash": _DASHES[place % len(_DASHES)]} if line.is_side else {"line_width": 1.8}
    plot.line("x", "y", source=source, color=colour, name=line.name, **style, **more)
    known = np.isfinite(line.y)
    alone = known & ~np.r_[False, known[:-1]] & ~np.r_[known[1:], False]  # a line does not show these
    if len(line.x) <= _FEW:
        plot.scatter("x", "y", source=source, size=4, color=colour, name=line.name)
    elif alone.any():
        plot.scatter(line.x[alone].astype(np.float64), line.y[alone], size=4, color=colour, name=line.name)
