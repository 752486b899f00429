"""A chart as a figure of matplotlib, whatever its kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from ..chart import (
    BAND,
    LINEAR,
    LOG,
    MARK,
    Array,
    Band,
    Bar,
    BarChart,
    Chart,
    Heatmap,
    HistogramChart,
    Line,
    LineChart,
    Mark,
)
from .style import SMALL, PaperStyle, colour, dash, new_figure, plain, set_ticks, wrapped

_HATCHES = ("", "////", "\\\\\\\\", "....")
_FLOOR = 0.5
"""Where the axis of a histogram begins, so that a bin with one token has a height."""
_ROW, _BAR = 0.06, 0.085
"""Inches that a name of a bar chart takes, and each of its bars."""
_PANEL, _MOST = 0.62, 9.0
"""Inches: height of a series in the overview of a run, and of all of them on a page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack(Chart):
    """Series one under the other, over one axis of steps."""

    charts: tuple[LineChart, ...]


def stack_of(series: Sequence[LineChart]) -> Stack:
    """The overview of a run."""
    return Stack(
        key="run", title="The run by step", unit="", sql="", charts=tuple(replace(chart, x_scale=LINEAR) for chart in series),
        note="Every series that moves, over one axis of steps. Dashed lines: where a series changed, with the interval of it.",
    )  # fmt: skip


def draw(one: Chart, style: PaperStyle | None = None) -> Figure:
    """Draw a chart. The figure belongs to no window and to no global state: `figure.savefig(path)` writes it."""
    style = style or PaperStyle()
    with style.settings():
        if isinstance(one, Stack):
            return _stack(one, style)
        if isinstance(one, BarChart):
            height = 0.75 + len(one.names) * (_ROW + _BAR * max(len(one.groups), 1))
            return _single(one, style, height, _draw_bars)
        if isinstance(one, Heatmap):
            return _single(one, style, 2.7, _draw_heatmap)
        if isinstance(one, HistogramChart):
            return _single(one, style, 2.1, _draw_histogram)
        assert isinstance(one, LineChart)
        return _single(one, style, 2.1, _draw_line_chart)


def _single(one: Any, style: PaperStyle, height: float, fill: Any) -> Figure:
    """A figure of the width of a column."""
    figure = new_figure(style.column, height)
    axes = figure.add_subplot()
    entries = fill(axes, one)
    _head(axes, one.title if style.title else "", entries, always=isinstance(one, Heatmap))
    return figure


def _stack(one: Stack, style: PaperStyle) -> Figure:
    """A figure of the width of a page: a panel a series, a line of one name in one colour everywhere."""
    num = max(len(one.charts), 1)
    figure = new_figure(style.page, min(0.6 + _PANEL * num, _MOST))
    figure.get_layout_engine().set(hspace=0.0, h_pad=0.015)  # type: ignore[union-attr,call-arg]
    places: dict[str, int] = {}
    for line in (line for chart in one.charts for line in chart.lines):
        places.setdefault(line.name, len(places))
    handles = {}
    panels = figure.subplots(num, 1, sharex=True, squeeze=False)[:, 0]
    for axes, chart in zip(panels, one.charts, strict=False):
        drawn = _draw_lines(axes, chart, places, most_ticks=4)
        handles.update({name: drawn[name] for name in places if name in drawn})
        label = wrapped(chart.title, 22, 2) + (f"\n{plain(chart.unit, 22)}" if chart.unit else "")
        axes.set_ylabel(label, rotation=0, ha="right", va="center", fontsize=SMALL)
    for axes in panels[:-1]:
        axes.tick_params(axis="x", which="both", length=0)
    _head(panels[0], one.title if style.title else "", handles)
    figure.align_ylabels(panels)
    panels[-1].set_xlabel(plain(one.charts[-1].x_label) if one.charts else "")
    return figure


# --- lines --------------------------------------------------------------------------------------------------------------


def _draw_line_chart(axes: Axes, one: LineChart) -> dict[str, Any]:
    handles = _draw_lines(axes, one)
    axes.set(xlabel=plain(one.x_label), ylabel=plain(one.unit, 30))
    return handles


def _draw_lines(
    axes: Axes, one: LineChart, places: Mapping[str, int] | None = None, most_ticks: int = 6
) -> dict[str, Any]:
    """Draw lines, marks and bands, and give what a legend says: name -> what was drawn.

    Lines take the colours of their place in the chart, or in `places` where that has their name.
    """
    _scale(axes, one)
    handles = {}
    for place, line in enumerate(one.lines):
        handles[line.name] = _draw_line(axes, line, (places or {}).get(line.name, place))
    low, high = axes.get_ylim()
    for band in one.bands:
        patch = axes.axhspan(
            band.low, band.high, facecolor=(BAND, 0.13), edgecolor=(BAND, 0.6), linewidth=0.6, zorder=0.5
        )
        if _overlaps(band, low, high):
            handles["published range"] = patch  # by whom it was, its CSV says
    axes.set_ylim(low, high)  # a band far off must not press the lines together
    set_ticks(axes.xaxis, integer=one.x_label == "step")
    set_ticks(axes.yaxis, most_ticks)
    _draw_marks(axes, one.marks)
    return handles


def _scale(axes: Axes, one: LineChart) -> None:
    """Set the axes before anything is drawn. A logarithmic axis of nothing above 0 would have no ends, so it stays linear."""
    if one.x_scale == LOG and _has_positive([line.x for line in one.lines]):
        axes.set_xscale("log")
    if one.y_scale == LOG and _has_positive([line.y for line in one.lines]):
        axes.set_yscale("log")


def _has_positive(values: Sequence[Array]) -> bool:
    return any(bool((each[np.isfinite(each)] > 0).any()) for each in values)


def _draw_line(axes: Axes, line: Line, place: int) -> Any:
    x, y = line.x.astype(np.float64), np.where(np.isfinite(line.y), line.y, np.nan)
    width = 0.7 if line.is_side else 1.2
    (drawn,) = axes.plot(x, y, color=colour(place), linestyle=dash(place, is_side=line.is_side), linewidth=width)
    if line.dots.any():
        axes.plot(
            x[line.dots], y[line.dots], linestyle="none", marker="o", markersize=1.6 if line.is_side else 2.4,
            color=colour(place),
        )  # fmt: skip
    return drawn


def _overlaps(band: Band, low: float, high: float) -> bool:
    return band.low <= high and band.high >= low


def _draw_marks(axes: Axes, marks: Sequence[Mark]) -> None:
    """Draw a dashed line at each place with its interval behind it and its step above; labels that would meet are staggered."""
    low, high = axes.get_xlim()
    for mark in marks:
        if mark.high > mark.low:
            axes.axvspan(mark.low, mark.high, facecolor=MARK, alpha=0.12, linewidth=0, zorder=0.6)
        axes.axvline(mark.x, color=MARK, linestyle=(0, (3, 1.6)), linewidth=0.8, zorder=1.5)
    axes.set_xlim(low, high)
    _label(axes, marks)


def _label(axes: Axes, marks: Sequence[Mark]) -> None:
    rows: list[float] = []
    for mark in sorted(marks, key=lambda mark: mark.x):
        at = float(axes.transData.transform((mark.x, 1.0))[0]) if np.isfinite(mark.x) else 0.0
        text = f"{mark.x:g}"
        row = next((row for row, end in enumerate(rows) if end < at), len(rows))
        figure = axes.get_figure(root=True)
        assert figure is not None
        rows[row : row + 1] = [at + (len(text) * 0.7 + 0.6) * 5.5 * figure.dpi / 72]
        axes.annotate(
            text, (mark.x, 1.0), xycoords=axes.get_xaxis_transform(), xytext=(1.2, -0.6 - 6.0 * row),
            textcoords="offset points", va="top", ha="left", fontsize=SMALL - 1, color=MARK, annotation_clip=False,
            bbox={"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 0.3}, zorder=3,
        )  # fmt: skip


# --- counts and named values --------------------------------------------------------------------------------------------


def _draw_heatmap(axes: Axes, one: Heatmap) -> dict[str, Any]:
    """Draw a cell in the colour of the decimal logarithm of its tokens, empty at 0."""
    row, column = np.nonzero(one.counts)
    left, right = one.x_edges[column], one.x_edges[column + 1]
    low, high = one.y_edges[row], one.y_edges[row + 1]
    corners = np.stack([left, low, left, high, right, high, right, low], axis=-1).reshape(-1, 4, 2)
    # Cells and not an image, so that a PDF stays sharp; edges of their own colour, or viewers show hairlines between them.
    cells = PolyCollection(
        list(corners), array=one.counts[row, column].astype(np.float64), cmap="cividis", edgecolors="face", linewidths=0.2,
        norm=LogNorm(1, max(float(one.counts.max(initial=0)), 10.0)),
    )  # fmt: skip
    axes.add_collection(cells, autolim=False)
    curves: dict[str, Any] = {}
    for curve in one.curves:
        place = list(curves).index(curve.name) if curve.name in curves else len(curves)
        (curves[curve.name],) = axes.plot(curve.x, curve.y, color=MARK, linestyle=dash(place + 1), linewidth=1.1)
    axes.set(xlim=(one.x_edges[0], one.x_edges[-1]), ylim=(one.y_edges[0], one.y_edges[-1]))
    axes.grid(False)
    if one.is_open:
        for edge, text in ((one.y_edges[-2], "beyond, above"), (one.y_edges[1], "beyond, below")):
            axes.axhline(edge, color="#777777", linestyle=(0, (1, 1.5)), linewidth=0.6)
            axes.annotate(
                text, (1.0, edge), xycoords=axes.get_yaxis_transform(), xytext=(-2, -1.5 if edge > 0 else 1.5),
                textcoords="offset points", ha="right", va="top" if edge > 0 else "bottom", fontsize=SMALL - 1, color="#555555",
            )  # fmt: skip
    set_ticks(axes.xaxis)
    set_ticks(axes.yaxis)
    axes.set(xlabel=plain(one.x_label), ylabel=plain(one.y_label, 40))
    figure = axes.get_figure(root=True)
    assert figure is not None
    bar = figure.colorbar(cells, ax=axes, aspect=28, pad=0.02)
    set_ticks(bar.ax.yaxis)
    bar.set_label(plain(one.unit, 30))
    assert bar.solids is not None
    bar.solids.set(rasterized=False, edgecolor="face", linewidth=0.2)
    bar.outline.set_linewidth(0.4)  # type: ignore[operator]  # matplotlib types it as what draws it
    return curves


def _draw_histogram(axes: Axes, one: HistogramChart) -> dict[str, Any]:
    """Draw bars on a logarithmic axis, none for a bin without tokens."""
    axes.set_yscale("log")
    handles = {}
    for place, (name, counts) in enumerate(one.counts.items()):
        tops = np.maximum(counts.astype(np.float64), _FLOOR)
        handles[name] = axes.stairs(
            tops, one.edges, baseline=_FLOOR, fill=True, facecolor=(colour(place), 0.35), edgecolor=(colour(place), 0.6),
            hatch=_HATCHES[place % len(_HATCHES)], linewidth=0,
        )  # fmt: skip
        axes.stairs(tops, one.edges, baseline=_FLOOR, color=colour(place), linestyle=dash(place), linewidth=0.9)
    highest = max((float(counts.max(initial=0)) for counts in one.counts.values()), default=0.0)
    axes.set(xlim=(one.edges[0], one.edges[-1]), ylim=(_FLOOR, max(highest, 5.0) * 2))
    if one.is_open:
        for low, high, text in ((one.edges[0], one.edges[1], "beyond"), (one.edges[-2], one.edges[-1], "beyond")):
            axes.axvspan(low, high, facecolor="#999999", alpha=0.25, linewidth=0, zorder=0.4)
            axes.annotate(
                text, ((low + high) / 2, 1.0), xycoords=axes.get_xaxis_transform(), xytext=(0, -2),
                textcoords="offset points", ha="center", va="top", rotation=90, fontsize=SMALL - 1, color="#555555",
            )  # fmt: skip
    set_ticks(axes.xaxis)
    set_ticks(axes.yaxis)
    axes.set(xlabel=plain(one.x_label), ylabel=plain(one.unit, 30))
    return handles


def _draw_bars(axes: Axes, one: BarChart) -> dict[str, Any]:
    """Draw bars with their intervals where there are any."""
    num_groups = max(len(one.groups), 1)
    height = 0.8 / num_groups
    handles = {}
    for place, (group, bars) in enumerate(one.groups.items()):
        y = np.array([one.names.index(bar.name) for bar in bars], float) + height * (place - (num_groups - 1) / 2)
        value = np.array([bar.value for bar in bars], float)
        handles[group] = axes.barh(
            y, np.where(np.isfinite(value), value, 0.0), height * 0.86, facecolor=(colour(place), 0.75),
            edgecolor=colour(place), hatch=_HATCHES[place % len(_HATCHES)], linewidth=0.5,
        )  # fmt: skip
        _draw_intervals(axes, bars, y)
    axes.set_yticks(range(len(one.names)), [plain(name, 28) for name in one.names])
    axes.set_ylim(len(one.names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0, labelsize=SMALL)
    axes.grid(False, axis="y")
    axes.axvline(0, color="black", linewidth=0.6)
    set_ticks(axes.xaxis)
    axes.set_xlabel(plain(one.x_label))
    return handles


def _draw_intervals(axes: Axes, bars: Sequence[Bar], y: Array) -> None:
    ends = np.array([(bar.low, bar.high) for bar in bars], float).reshape(-1, 2)
    known = np.isfinite(ends).all(axis=1)
    axes.hlines(y[known], ends[known, 0], ends[known, 1], color="#333333", linewidth=0.8)
    for side in (0, 1):
        axes.plot(ends[known, side], y[known], linestyle="none", marker="|", markersize=3, color="#333333")


# --- what stands above the axes -----------------------------------------------------------------------------------------

_LETTER = 0.56
"""Width of a letter over the font's size, about."""
_AXIS = 0.6
"""Inches that an axis with its ticks takes of the figure's width, about."""
_HANDLE = 6
"""Letters that the drawn part of an entry takes, with the room around it."""
_LINE = 1.32
"""Height of a row over the font's size."""


def _head(axes: Axes, title: str, entries: Mapping[str, Any], *, always: bool = False) -> None:
    """Put a title above the axes, and between them a legend where there is more than one name, or `always`."""
    names = [plain(name, 46) for name in entries]
    figure = axes.get_figure(root=True)
    assert figure is not None
    width = figure.get_figwidth()
    columns = _columns(names, width)
    rows = -(-len(names) // columns) if len(names) > (0 if always else 1) else 0
    if title:
        axes.set_title(wrapped(title, int((width - _AXIS) * 72 / (8 * _LETTER))), pad=4 + rows * SMALL * _LINE)
    if rows:
        figure.set_figheight(figure.get_figheight() + rows * SMALL * _LINE / 72)  # the axes keep their height
        axes.legend(
            list(entries.values()),
            [f" {name}" if name.startswith("_") else name for name in names],  # matplotlib leaves out names with _ in front
            loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=columns,
        )  # fmt: skip


def _columns(names: list[str], width: float) -> int:
    """As many columns as fit into a width in inches."""
    longest = max((len(name) for name in names), default=0) + _HANDLE
    return max(1, min(len(names) or 1, int((width - _AXIS) * 72 / (longest * SMALL * _LETTER))))
