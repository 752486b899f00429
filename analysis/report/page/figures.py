"""Charts as figures of Bokeh, which draws them in the reader's browser.

Bokeh, because its script comes with the package and can be inlined (1.3 MB, BSD-3, kept since 2013), because it draws on a
canvas, and because figures of one document can share an axis, a crosshair and a zoom. Colours are those of Okabe and Ito,
which are told apart with any kind of colour vision; text and grids take theirs from the page when it is shown.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from bokeh.models import (
    BoxAnnotation,
    ColumnDataSource,
    CrosshairTool,
    CustomJS,
    FixedTicker,
    HoverTool,
    LinearColorMapper,
    Range1d,
    ResetTool,
    Span,
    Whisker,
)
from bokeh.palettes import Cividis256
from bokeh.plotting import figure

from .. import chart
from ..chart import Chart, Density, Histogram, Line, Lines, Shares

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A7A00", "#888888")
"""Okabe and Ito's, the yellow darkened so that it is seen on white."""

_HOVER, _CLICK = "timTrace.hover(cb_obj.x)", "timTrace.click(cb_obj.x)"
_DASHES = ("dashed", "dotted", "dotdash", "dashdot")
"""Of lines that stand beside others: not told apart by colour alone."""
_LABELS = 22
"""Pixels of the step labels, which only the last figure has."""
_FEW = 40
"""Points of a line up to which each is marked."""
_LEFT = 76
"""Pixels left of a frame, so that stacked figures stand one under the other."""


def stacked(charts: Iterable[Lines]) -> list[figure]:
    """One figure a series, over one axis of steps: zoom, crosshair and the chosen step are shared."""
    charts = list(charts)
    if not charts:
        return []
    ends = [(line.x.min(), line.x.max()) for one in charts for line in one.lines if len(line.x)]
    low, high = float(min(low for low, _ in ends)), float(max(high for _, high in ends))
    room = max((high - low) * 0.015, 0.5)
    steps = Range1d(low - room, high + room, bounds=(low - 2 * room, high + 2 * room))
    cross = Span(dimension="height", line_color="#888888", line_dash="dotted", line_width=1)
    plots = [_of_series(one, steps, cross) for one in charts]
    for plot in plots[:-1]:
        plot.xaxis.major_label_text_font_size = "0px"
        plot.xaxis.major_tick_line_color = None
    plots[-1].height += _LABELS
    return plots


def single(one: Chart) -> figure:
    """A figure that stands for itself."""
    if isinstance(one, Density):
        return _density(one)
    if isinstance(one, Histogram):
        return _histogram(one)
    if isinstance(one, Shares):
        return _shares(one)
    assert isinstance(one, Lines)
    return _lines(one)


def _of_series(one: Lines, steps: Range1d, cross: Span) -> figure:
    plot = figure(
        name=one.key, height=100, sizing_mode="stretch_width", x_range=steps, y_axis_type=one.y_scale, toolbar_location=None,
        tools="xpan,xwheel_zoom,xbox_zoom", active_drag="xbox_zoom", active_scroll=None, min_border_left=_LEFT,
        min_border_right=12, lod_threshold=None,
    )  # fmt: skip
    plot.add_tools(CrosshairTool(overlay=cross), ResetTool())
    _mark(plot, one)
    for place, line in enumerate(one.lines):
        _draw(plot, line, place, name=f"{one.key}/{place}")
    plot.add_layout(
        Span(name="chosen", dimension="height", line_color="#E69F00", line_width=2, visible=False)  # moved by the page
    )
    plot.js_on_event("mousemove", CustomJS(code=_HOVER))
    plot.js_on_event("tap", CustomJS(code=_CLICK))
    plot.js_on_event("doubletap", CustomJS(code="timTrace.whole()"))
    return _plain(plot)


def _mark(plot: figure, one: Lines) -> None:
    for band in one.bands:
        plot.add_layout(
            BoxAnnotation(bottom=band.low, top=band.high, fill_color="#009E73", fill_alpha=0.13, line_color=None)
        )
    for mark in one.marks:
        if mark.high > mark.low:
            plot.add_layout(
                BoxAnnotation(left=mark.low, right=mark.high, fill_color="#D55E00", fill_alpha=0.06, line_color=None)
            )
        plot.add_layout(
            Span(location=mark.x, dimension="height", line_color="#D55E00", line_dash="dashed", line_width=1.5)
        )


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


def _lines(one: Lines) -> figure:
    plot = figure(
        name=one.key, height=260, sizing_mode="stretch_width", x_axis_type=one.x_scale, y_axis_type=one.y_scale,
        toolbar_location=None, tools="", x_axis_label=one.x_label, min_border_left=_LEFT,
    )  # fmt: skip
    _mark(plot, one)
    for place, line in enumerate(one.lines):
        _draw(plot, line, place, name=f"{one.key}/{place}", legend_label=line.name)
    plot.add_tools(
        HoverTool(tooltips=[(one.x_label, "@x{0.[000]}"), ("", "@y{0.[00000]a} " + one.unit), ("", "$name")])
    )
    if one.x_label == "step":
        plot.js_on_event("tap", CustomJS(code=_CLICK))
        plot.add_layout(Span(name="chosen", dimension="height", line_color="#E69F00", line_width=2, visible=False))
    return _plain(plot)


def _density(one: Density) -> figure:
    x, y = one.x_edges, one.y_edges
    plot = figure(
        name=one.key, height=360, sizing_mode="stretch_width", x_range=(float(x[0]), float(x[-1])),
        y_range=(float(y[0]), float(y[-1])), toolbar_location=None, tools="", x_axis_label=one.x_label,
        y_axis_label=one.y_label, min_border_left=_LEFT,
    )  # fmt: skip
    shown = shown_counts(one.counts)
    source = ColumnDataSource({"image": [shown], "counts": [one.counts.astype(np.float32)]}, name=f"{one.key}/0")
    highest = float(np.nanmax(shown)) if np.isfinite(shown).any() else 1.0
    colours = LinearColorMapper(
        palette=Cividis256, low=0.0, high=max(highest, 0.3), nan_color="rgba(0, 0, 0, 0)", name="counts"
    )
    cells = plot.image(
        "image", x=float(x[0]), y=float(y[0]), dw=float(x[-1] - x[0]), dh=float(y[-1] - y[0]), source=source,
        color_mapper=colours,
    )  # fmt: skip
    for line in one.curves:
        plot.line(line.x, line.y, color="#D55E00", line_width=1.6, line_dash="dashed", legend_label=line.name)
    plot.add_tools(
        HoverTool(
            renderers=[cells],
            tooltips=[(one.x_label, "$x{0.000}"), ("d", "$y{0.00000} nats"), ("tokens", "@counts{0,0}")],
        )
    )
    bar = cells.construct_color_bar(
        width=10, title="tokens", ticker=FixedTicker(ticks=list(range(int(highest) + 1))), background_fill_alpha=0,
        major_label_overrides={power: f"{10**power:,}" for power in range(int(highest) + 1)},
    )  # fmt: skip
    plot.add_layout(bar, "right")
    return _plain(plot)


def shown_counts(counts: np.ndarray) -> np.ndarray:
    """Counts as the density colours them: decimal logarithms, NaN where there is none."""
    with np.errstate(divide="ignore"):
        return np.where(counts > 0, np.log10(np.maximum(counts, 1)), np.nan).astype(np.float32)


def _histogram(one: Histogram) -> figure:
    plot = figure(
        name=one.key, height=240, sizing_mode="stretch_width", y_axis_type="log", toolbar_location=None, tools="",
        x_axis_label=one.x_label, y_axis_label="tokens", min_border_left=_LEFT,
    )  # fmt: skip
    edges = one.edges.astype(np.float64)
    for place, (name, counts) in enumerate(one.counts.items()):
        source = ColumnDataSource(
            {"left": edges[:-1], "right": edges[1:], "top": bar_tops(counts), "counts": counts.astype(np.float64)},
            name=f"{one.key}/{place}",
        )
        plot.quad(
            left="left", right="right", top="top", bottom=0.5, source=source, name=name, legend_label=name,
            color=COLOURS[place], fill_alpha=0.45 if place else 0.7, line_width=1,
            hatch_pattern=" " if place == 0 else "right_diagonal_line", hatch_color=COLOURS[place], hatch_alpha=0.7,
        )  # fmt: skip
    plot.add_tools(
        HoverTool(tooltips=[("", "$name"), ("ln ratio", "@left{0.0000} to @right{0.0000}"), ("tokens", "@counts{0,0}")])
    )
    return _plain(plot)


def bar_tops(counts: np.ndarray) -> np.ndarray:
    """Where the bars of counts end: none is drawn for 0, and the axis begins at a half."""
    return np.where(counts > 0, counts, np.nan).astype(np.float64)


def _shares(one: Shares) -> figure:
    names = list(dict.fromkeys(share.name for group in one.groups.values() for share in group))[::-1]
    plot = figure(
        name=one.key, height=90 + len(names) * (12 + 10 * len(one.groups)), sizing_mode="stretch_width", y_range=names,
        toolbar_location=None, tools="", x_axis_label=one.x_label,
    )  # fmt: skip
    width = 0.8 / len(one.groups)
    for place, (group, shares) in enumerate(one.groups.items()):
        offset = width * (place - (len(one.groups) - 1) / 2)
        source = ColumnDataSource(
            {
                "y": [(share.name, offset) for share in shares], "value": [share.value for share in shares],
                "low": [_or(share.low, share.value) for share in shares],
                "high": [_or(share.high, share.value) for share in shares], "text": [share.text for share in shares],
                "name": [share.name for share in shares],
            },
            name=f"{one.key}/{place}",
        )  # fmt: skip
        bars = plot.hbar(
            y="y", right="value", height=width * 0.86, source=source, color=COLOURS[place], fill_alpha=0.75, name=group,
            **({"legend_label": group} if len(one.groups) > 1 else {}),
        )  # fmt: skip
        if any(share.low is not None for share in shares):
            plot.add_layout(
                Whisker(base="y", lower="low", upper="high", dimension="width", source=source, line_color="#777777")
            )
        plot.add_tools(
            HoverTool(
                renderers=[bars],
                tooltips=[
                    ("", "@name"),
                    (group, "@value{0.[00000]} (@low{0.[0000]} to @high{0.[0000]})"),
                    ("", "@text"),
                ],
            )
        )
    return _plain(plot)


def _or(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value


def _plain(plot: figure) -> figure:
    """Nothing of its own behind the figure: the page is light or dark."""
    plot.background_fill_alpha = 0
    plot.border_fill_alpha = 0
    plot.outline_line_alpha = 0
    plot.grid.grid_line_alpha = 0.25
    plot.axis.minor_tick_line_color = None
    if plot.legend:
        plot.add_layout(plot.legend[0], "above")
        plot.legend.orientation = "horizontal"
        plot.legend.margin = 0
        plot.legend.background_fill_alpha = 0
        plot.legend.border_line_alpha = 0
        plot.legend.click_policy = "hide"
        plot.legend.label_text_font_size = "11px"
        plot.legend.spacing = 14
        plot.legend.padding = 2
    return plot


__all__ = ["COLOURS", "bar_tops", "chart", "shown_counts", "single", "stacked"]
