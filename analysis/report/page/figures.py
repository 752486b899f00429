"""Draw charts as Bokeh figures with placeholder colours, because only the page knows whether it is light or dark."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from bokeh.models import (
    BoxAnnotation,
    CategoricalAxis,
    ColumnDataSource,
    CustomJS,
    CustomJSTickFormatter,
    FixedTicker,
    HoverTool,
    Label,
    LinearColorMapper,
    NoOverlap,
    Range1d,
    ResetTool,
    Span,
    Whisker,
)
from bokeh.palettes import Cividis256
from bokeh.plotting import figure

from ..chart import BAND, COLOURS, LINEAR, MARK, BarChart, Chart, Heatmap, Line, LineChart

THEME = {"--ink-soft": "#0a0b01", "--line": "#0a0b02", "--paper": "#0a0b03"}
_INK, _LINE, _PAPER = THEME.values()

_LEFT = 76
_HOVER, _CLICK = "timTrace.hover(cb_obj.x)", "timTrace.click(cb_obj.x)"
_DASHES = ("dashed", "dotted", "dotdash", "dashdot")
"""Dash patterns for secondary lines, so that no two lines differ only in colour."""
_LABELS = 22
_NEAR_ONE = 1e-5
_DISTANCE = (
    "return tick === 1 ? '1' : (tick < 1 ? '1 - ' : '1 + ') + Number(Math.abs(1 - tick).toPrecision(3)).toExponential()"
)
_SHORT = (
    "const size = Math.abs(tick), n = Number(tick.toPrecision(6)); "
    "return size !== 0 && (size < 1e-3 || size >= 1e6) ? n.toExponential() : String(n)"
)


def stacked(charts: Iterable[LineChart]) -> list[figure]:
    """Return one figure per series. The figures share a step axis, labelled on the first and last of them, and the page
    draws the step markers."""
    charts = list(charts)
    if not charts:
        return []
    ends = [(line.x.min(), line.x.max()) for one in charts for line in one.lines if len(line.x)]
    low, high = float(min(low for low, _ in ends)), float(max(high for _, high in ends))
    room = max((high - low) * 0.015, 0.5, math.ulp(high))
    steps = Range1d(low - room, high + room, bounds=(low - 2 * room, high + 2 * room))
    plots = [_of_series(one, steps) for one in charts]
    for plot in plots[1:-1]:
        plot.xaxis.major_label_text_font_size = "0px"
        plot.xaxis.major_tick_line_color = None
    plots[-1].height += _LABELS  # the first keeps its height, to fit on the first screen
    return plots


def single(one: Chart) -> figure:
    if isinstance(one, Heatmap):
        return _heatmap(one)
    if isinstance(one, BarChart):
        return _bar_chart(one)
    assert isinstance(one, LineChart)
    return _line_chart(one)


def _of_series(one: LineChart, steps: Range1d) -> figure:
    plot = _new(
        one.key, 100, x_range=steps, y_axis_type=one.y_scale, tools="xpan,xwheel_zoom,xbox_zoom", active_drag="xbox_zoom",
        active_scroll=None, min_border_right=12, lod_threshold=None,
    )  # fmt: skip
    plot.add_tools(ResetTool())
    _add_marks(plot, one)
    values = np.concatenate([line.y[np.isfinite(line.y)] for line in one.lines])
    if len(values) and np.all(np.abs(1 - values) < _NEAR_ONE):
        plot.yaxis.formatter = CustomJSTickFormatter(code=_DISTANCE)
    elif one.y_scale == LINEAR:
        plot.yaxis.formatter = CustomJSTickFormatter(code=_SHORT)
    for place, line in enumerate(one.lines):
        _add_line(plot, line, place, name=f"{one.key}/{place}")
    plot.js_on_event("mousemove", CustomJS(code=_HOVER))
    plot.js_on_event("tap", CustomJS(code=_CLICK))
    plot.js_on_event("doubletap", CustomJS(code="timTrace.whole()"))
    return _styled(plot)


def _line_chart(one: LineChart) -> figure:
    plot = _new(one.key, 260, x_axis_type=one.x_scale, y_axis_type=one.y_scale, x_axis_label=one.x_label)
    _add_marks(plot, one)
    for place, line in enumerate(one.lines):
        _add_line(plot, line, place, name=f"{one.key}/{place}", has_legend=True)
    plot.add_tools(
        HoverTool(tooltips=[(one.x_label, "@x{0.[000]}"), ("", "@y{0.[00000]a} " + one.unit), ("", "$name")])
    )
    if one.x_label == "step":
        plot.js_on_event("tap", CustomJS(code=_CLICK))
        plot.add_layout(Span(name="chosen", dimension="height", line_color="#E69F00", line_width=2, visible=False))
    return _styled(plot)


def _add_marks(plot: figure, one: LineChart) -> None:
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


def _add_line(plot: figure, line: Line, place: int, name: str, *, has_legend: bool = False) -> None:
    source = ColumnDataSource({"x": line.x.astype(np.float64), "y": line.y.astype(np.float64)}, name=name)
    colour = COLOURS[place % len(COLOURS)]
    style = {"line_width": 1.3, "line_dash": _DASHES[place % len(_DASHES)]} if line.is_side else {"line_width": 1.8}
    legend = {"legend_label": line.name} if has_legend else {}
    plot.line("x", "y", source=source, color=colour, name=line.name, **style, **legend)
    if line.dots.all():
        plot.scatter("x", "y", source=source, size=4, color=colour, name=line.name)
    elif line.dots.any():
        plot.scatter(line.x[line.dots].astype(np.float64), line.y[line.dots], size=4, color=colour, name=line.name)


def _heatmap(one: Heatmap) -> figure:
    x, y = one.x_edges, one.y_edges
    plot = _new(
        one.key, 360, x_range=(float(x[0]), float(x[-1])), y_range=(float(y[0]), float(y[-1])), x_axis_label=one.x_label,
        y_axis_label=one.y_label,
    )  # fmt: skip
    with np.errstate(divide="ignore"):
        shown = np.where(one.counts > 0, np.log10(np.maximum(one.counts, 1)), np.nan).astype(np.float32)
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
        plot.line(line.x, line.y, color=MARK, line_width=1.6, line_dash="dashed", legend_label=line.name)
    plot.add_tools(
        HoverTool(
            renderers=[cells],
            tooltips=[(one.x_label, "$x{0.000}"), ("d", "$y{0.00000} nats"), ("tokens", "@counts{0,0}")],
        )
    )
    bar = cells.construct_color_bar(
        width=10, title="tokens", ticker=FixedTicker(ticks=list(range(int(highest) + 1))), background_fill_alpha=0,
        major_label_overrides={power: f"{10**power:,}" for power in range(int(highest) + 1)},
        major_label_text_color=_INK, title_text_color=_INK, bar_line_color=_LINE,
    )  # fmt: skip
    plot.add_layout(bar, "right")
    for edge, text, baseline in ((y[-2], "all above", "top"), (y[1], "all below", "bottom")):
        plot.add_layout(Span(location=float(edge), dimension="width", line_color="#888888", line_dash="dotted"))
        label = Label(
            x=float(x[-1]), y=float(edge), text=text, text_color=_INK, text_font_size="11px", text_align="right",
            text_baseline=baseline, x_offset=-4,
        )  # fmt: skip
        plot.add_layout(label)
    return _styled(plot)


def _bar_chart(one: BarChart) -> figure:
    height = 90 + len(one.names) * (12 + 10 * len(one.groups))
    plot = _new(
        one.key, height, y_range=one.names[::-1], x_range=_ends(one), x_axis_label=one.x_label, min_border_left=0
    )
    width = 0.8 / len(one.groups)
    for place, (group, bars) in enumerate(one.groups.items()):
        offset = width * (place - (len(one.groups) - 1) / 2)
        source = ColumnDataSource(
            {
                "y": [(bar.name, offset) for bar in bars], "value": [bar.value for bar in bars],
                "low": [bar.value if bar.low is None else bar.low for bar in bars],
                "high": [bar.value if bar.high is None else bar.high for bar in bars], "text": [bar.text for bar in bars],
                "name": [bar.name for bar in bars],
            },
            name=f"{one.key}/{place}",
        )  # fmt: skip
        drawn = plot.hbar(
            y="y", right="value", height=width * 0.86, source=source, color=COLOURS[place], fill_alpha=0.75, name=group,
            **({"legend_label": group} if len(one.groups) > 1 else {}),
        )  # fmt: skip
        if any(bar.low is not None for bar in bars):
            plot.add_layout(
                Whisker(base="y", lower="low", upper="high", dimension="width", source=source, line_color="#777777")
            )
        told = [("", "@name"), (group, "@value{0.[00000]} (@low{0.[0000]} to @high{0.[0000]})"), ("", "@text")]
        plot.add_tools(HoverTool(renderers=[drawn], tooltips=told))
    return _styled(plot)


def _ends(one: BarChart) -> Range1d:
    """Return an axis range that includes 0 and the intervals, because Bokeh's default includes only the bars."""
    each = [bar for group in one.groups.values() for bar in group]
    ends = [0.0] + [end for bar in each for end in (bar.value, bar.low, bar.high) if end is not None]
    known = [end for end in ends if math.isfinite(end)]
    room = 0.05 * (max(known) - min(known)) or 1.0
    return Range1d(min(known) - room, max(known) + room)


# --- shared by all figures ----------------------------------------------------------------------------------------------


def _new(key: str, height: int, **options: object) -> figure:
    options = {"tools": "", "min_border_left": _LEFT} | options
    return figure(name=key, height=height, sizing_mode="stretch_width", toolbar_location=None, **options)


def _styled(plot: figure) -> figure:
    plot.background_fill_alpha = 0
    plot.border_fill_color = _PAPER
    plot.outline_line_alpha = 0
    plot.grid.grid_line_color = _LINE
    plot.grid.grid_line_alpha = 0.25
    for axis in plot.axis:
        axis.update(
            axis_label_text_color=_INK, major_label_text_color=_INK, axis_line_color=_LINE, major_tick_line_color=_LINE,
            axis_label_text_font_style="normal", axis_label_text_font_size="12px", minor_tick_line_color=None,
        )  # fmt: skip
        if not isinstance(axis, CategoricalAxis):
            axis.major_label_policy = NoOverlap(min_distance=3)
    if plot.legend:
        plot.add_layout(plot.legend[0], "above")
        plot.legend.update(
            orientation="horizontal", margin=0, background_fill_alpha=0, border_line_alpha=0, click_policy="hide",
            label_text_font_size="11px", label_text_color=_INK, spacing=14, padding=2,
        )  # fmt: skip
    return plot
