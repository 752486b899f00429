"""Draw charts with matplotlib and its bundled font, so that a given version draws identical bytes on every machine."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from matplotlib import style as matplotlib_style
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter

from ....schemas.errors import InvalidOption
from ..chart import BAND, COLOURS, LINEAR, LOG, MARK, Array, BarChart, Chart, Heatmap, LineChart

FONT = "DejaVu Sans"
WIDTHS: dict[str, tuple[float, float]] = {
    "column": (3.4, 7.0), "aaai": (3.3, 7.0), "acl": (3.03, 6.3), "acm": (3.33, 7.0), "iclr": (5.5, 5.5), "icml": (3.25, 6.75),
    "ieee": (3.5, 7.16), "jmlr": (6.0, 6.0), "nature": (3.5, 7.2), "neurips": (5.5, 5.5),
}  # fmt: skip
"""Widths in inches by style: a single figure (one column), and the run overview (full text width)."""
DPI, SMALL = 200, 6.5
Handle = Artist | tuple[Artist, ...]
"""Part of a chart that the legend shows."""
Dash = str | tuple[int, tuple[float, ...]]
_DASHES: tuple[Dash, ...] = ("solid", (0, (4, 1.6)), (0, (1.2, 1.6)), (0, (6, 1.6, 1.2, 1.6)), (0, (2.2, 1.6)))
"""Dash patterns of lines. The first 40 lines differ, because 5 patterns and 8 colours have no common factor."""
_SETTINGS = {
    "font.family": FONT, "font.size": 8, "axes.spines.top": False, "axes.spines.right": False,
    "axes.linewidth": 0.6, "axes.axisbelow": True, "axes.grid": True, "grid.color": "#E4E4E4", "grid.linewidth": 0.5,
    "xtick.labelsize": SMALL, "ytick.labelsize": SMALL, "legend.fontsize": SMALL, "legend.frameon": False,
    "legend.borderpad": 0.1, "legend.borderaxespad": 0.2, "legend.labelspacing": 0.25, "lines.scale_dashes": False,
    "lines.linewidth": 1.2, "text.usetex": False, "figure.dpi": DPI, "savefig.dpi": "figure", "svg.hashsalt": "tim-trace",
    # Embed TrueType fonts in PDF, because journals require this. Store text in SVG as outlines, which need no font.
    "pdf.fonttype": 42, "svg.fonttype": "path",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperStyle:
    column: float = WIDTHS["column"][0]
    page: float = WIDTHS["column"][1]

    def settings(self) -> AbstractContextManager[None]:
        return matplotlib_style.context(_SETTINGS, after_reset=True)


PLAIN = PaperStyle()


def paper_style(width: str | float = "column") -> PaperStyle:
    """Return a style for a width, given in inches or as a key of `WIDTHS`. Raises InvalidOption."""
    try:
        column, page = WIDTHS[width] if width in WIDTHS else (float(width), float(width))
    except (TypeError, ValueError):
        column = page = math.nan
    if not 2 <= column <= page <= 20:
        raise InvalidOption(f"got {width!r}; pass 2 to 20 inches, or one of {', '.join(WIDTHS)}", option="width")
    return PaperStyle(column=column, page=page)


def colour(place: int) -> str:
    return COLOURS[place % len(COLOURS)]


def dash(place: int, *, is_side: bool = False) -> Dash:
    side = 1 + (place + place // len(COLOURS)) % (len(_DASHES) - 1)
    return _DASHES[side if is_side else place % len(_DASHES)]


def set_ticks(axis: Axis, most: int = 6, *, integer: bool = False) -> None:
    low, high = sorted(axis.get_view_interval())
    decades = float(np.log10(high) - np.log10(low)) if axis.get_scale() == "log" else 0.0
    if decades < 0.6:
        axis.set_major_locator(MaxNLocator(nbins=most, integer=integer, steps=[1, 2, 2.5, 5, 10]))
    else:
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if decades < 1.7 else (1.0,), numticks=most))
    axis.set_major_formatter(StrMethodFormatter("{x:.14g}"))
    axis.set_minor_formatter(NullFormatter())


def plain(text: str, most: int = 60) -> str:
    return one_line(text, most).replace("$", r"\$")  # matplotlib would read $...$ as a formula


def wrapped(text: str, width: int, most_lines: int = 3) -> str:
    lines = textwrap.wrap(one_line(text, width * most_lines), width)
    return "\n".join(lines[:most_lines]).replace("$", r"\$")


def one_line(text: str, most: int) -> str:
    shown = "".join(
        each if ord(each) in _glyphs() and each.isprintable() else each.encode("unicode_escape").decode()
        for each in " ".join(text.split())
    )
    return shown if len(shown) <= most else f"{shown[: most // 2 - 1]}...{shown[2 + most // 2 - most :]}"


@cache
def _glyphs() -> frozenset[int]:
    return frozenset(get_font(findfont(FONT)).get_charmap())


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack(Chart):
    charts: tuple[LineChart, ...]


def stack_of(series: Sequence[LineChart]) -> Stack:
    charts = tuple(replace(chart, x_scale=LINEAR) for chart in series)
    return Stack(key="run", title="The run by step", unit="", note="", sql="", charts=charts)


def draw(one: Chart, style: PaperStyle = PLAIN) -> Figure:
    """Draw a chart as a figure that pyplot does not manage. Write the figure with `figure.savefig(path)`."""
    with style.settings():
        if isinstance(one, Stack):
            return _stack(one, style)
        assert isinstance(one, (LineChart, Heatmap, BarChart))
        height = 2.1 if isinstance(one, LineChart) else 2.7
        if isinstance(one, BarChart):
            height = 0.75 + len(one.names) * (0.06 + 0.085 * len(one.groups))
        figure = Figure(figsize=(style.column, height), layout="constrained")
        axes = figure.add_subplot()
        if isinstance(one, LineChart):
            entries = draw_lines(axes, one)
        else:
            entries = _draw_heatmap(axes, one) if isinstance(one, Heatmap) else _draw_bars(axes, one)
        _head(figure, axes, one, entries)
        set_ticks(axes.xaxis, integer=one.x_label == "step")
        axes.set_xlabel(plain(one.x_label))
        if not isinstance(one, BarChart):
            set_ticks(axes.yaxis)
            axes.set_ylabel(plain(one.y_label if isinstance(one, Heatmap) else one.unit, 40))
        return figure


def _stack(one: Stack, style: PaperStyle) -> Figure:
    figure = Figure(figsize=(style.page, min(0.6 + 0.62 * len(one.charts), 9.0)), layout="constrained")
    names = dict.fromkeys(line.name for chart in one.charts for line in chart.lines)
    places = {name: place for place, name in enumerate(names)}
    handles: dict[str, Handle] = {}
    panels = figure.subplots(len(one.charts), 1, sharex=True, squeeze=False)[:, 0]
    for axes, chart in zip(panels, one.charts, strict=True):
        handles |= draw_lines(axes, chart, places)
        set_ticks(axes.xaxis, integer=True)
        set_ticks(axes.yaxis, most=4)
        label = wrapped(chart.title, 22, 2) + (f"\n{plain(chart.unit, 22)}" if chart.unit else "")
        axes.set_ylabel(label, rotation=0, ha="right", va="center", fontsize=SMALL)
    panels[-1].set_xlabel("step")
    figure.align_ylabels(panels)
    _head(figure, panels[0], one, {name: handles[name] for name in places})
    return figure


def draw_lines(axes: Axes, one: LineChart, places: Mapping[str, int] | None = None) -> dict[str, Handle]:
    # Use a linear axis if no value is positive, because a logarithmic axis would have no limits.
    axes.set_xscale("log" if one.x_scale == LOG and _has_positive(line.x for line in one.lines) else "linear")
    axes.set_yscale("log" if one.y_scale == LOG and _has_positive(line.y for line in one.lines) else "linear")
    handles: dict[str, Handle] = {}
    for own, line in enumerate(one.lines):
        place = own if places is None else places[line.name]
        x, y = line.x.astype(np.float64), np.where(np.isfinite(line.y), line.y, np.nan)
        width, size = (0.7, 1.6) if line.is_side else (1.2, 2.4)
        pattern, tint = dash(place, is_side=line.is_side), colour(place)
        (handles[line.name],) = axes.plot(x, y, linestyle=pattern, color=tint, linewidth=width, markersize=size)
        x, y = x[line.dots], y[line.dots]
        axes.plot(x, y, linestyle="none", marker="o", color=tint, linewidth=width, markersize=size)
    low, high = axes.get_ylim()
    for band in one.bands:
        patch = axes.axhspan(band.low, band.high, facecolor=(BAND, 0.13), edgecolor=(BAND, 0.6), zorder=0.5)
        if band.low <= high and band.high >= low:
            handles["published range"] = patch  # the chart's CSV file names the source
    axes.set_ylim(low, high)  # keep a distant band from flattening the lines
    near, row, last = 0.08 * float(np.ptp(axes.get_xlim())), 0, -np.inf
    for mark in sorted(one.marks, key=lambda mark: mark.x):
        axes.axvspan(mark.low, mark.high, facecolor=MARK, alpha=0.12, linewidth=0, zorder=0.6)
        axes.axvline(mark.x, color=MARK, linestyle=dash(1), linewidth=0.8, zorder=1.5)
        row, last = row + 1 if mark.x - last < near else 0, mark.x  # put close labels in separate rows
        _note(axes, f"{mark.x:g}", (mark.x, 1.0), "x", (1.2, -0.6 - 6.0 * row), va="top", color=MARK)
    return handles


def _has_positive(values: Iterable[Array]) -> bool:
    return any(bool((each[np.isfinite(each)] > 0).any()) for each in values)


def _note(axes: Axes, text: str, at: tuple[float, float], along: str, shift: tuple[float, float], **how: Any) -> None:
    axes.annotate(
        text, at, xycoords=getattr(axes, f"get_{along}axis_transform")(), xytext=shift, textcoords="offset points",
        fontsize=SMALL - 1, bbox={"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 0.3}, **how,
    )  # fmt: skip


def _draw_heatmap(axes: Axes, one: Heatmap) -> dict[str, Handle]:
    # Without edges, PDF viewers show hairlines between cells.
    norm = LogNorm(1, max(float(one.counts.max(initial=0)), 10.0))
    counts = np.where(one.counts > 0, one.counts, np.nan)
    edges = (one.x_edges, one.y_edges)
    cells = axes.pcolormesh(*edges, counts, cmap="cividis", norm=norm, edgecolor="face", linewidth=0.2)
    bar = axes.figure.colorbar(cells, ax=axes, aspect=28, pad=0.02, label=plain(one.unit, 30))
    bar.solids.set(rasterized=False, edgecolor="face", linewidth=0.2)  # type: ignore[union-attr]  # None only before it is drawn
    set_ticks(bar.ax.yaxis)
    names = list(dict.fromkeys(curve.name for curve in one.curves))
    curves: dict[str, Handle] = {}
    for curve in one.curves:
        (curves[curve.name],) = axes.plot(curve.x, curve.y, color=MARK, linestyle=dash(1 + names.index(curve.name)))
    axes.set(xlim=one.x_edges[[0, -1]], ylim=one.y_edges[[0, -1]])
    axes.grid(False)
    for edge, side, sign in ((-2, "above", -1), (1, "below", 1)):
        y = float(one.y_edges[edge])
        axes.axhline(y, color="#777777", linestyle="dotted", linewidth=0.6)
        _note(axes, f"beyond, {side}", (1.0, y), "y", (-2, 1.5 * sign), ha="right", va="top" if sign < 0 else "bottom")
    return curves


def _draw_bars(axes: Axes, one: BarChart) -> dict[str, Handle]:
    height = 0.8 / max(len(one.groups), 1)
    handles: dict[str, Handle] = {}
    for place, (group, bars) in enumerate(one.groups.items()):
        y = np.array([one.names.index(bar.name) for bar in bars]) + height * (place - (len(one.groups) - 1) / 2)
        value, low, high = np.array([(bar.value, bar.low, bar.high) for bar in bars], float).reshape(-1, 3).T
        known, value = np.isfinite(low) & np.isfinite(high), np.where(np.isfinite(value), value, 0.0)
        handles[group] = axes.barh(y, value, height * 0.86, color=(colour(place), 0.75), edgecolor=colour(place))
        axes.hlines(y[known], low[known], high[known], color="#333333", linewidth=0.8)
    axes.set_yticks(range(len(one.names)), [plain(name, 28) for name in one.names])
    axes.set_ylim(len(one.names) - 0.4, -0.6)
    axes.grid(False, axis="y")
    axes.axvline(0, color="black", linewidth=0.6)
    return handles


def _head(figure: Figure, axes: Axes, one: Chart, entries: Mapping[str, Handle]) -> None:
    names = [plain(name, 46) for name in entries]
    width = (figure.get_figwidth() - 0.6) * 72 / 0.56  # width to the right of the y axis, in letters at 1 pt
    longest = max(map(len, names), default=0) + 6  # number of letters, including the legend handle
    columns = max(1, min(len(names), int(width / (longest * SMALL))))
    height = 1.32 * SMALL * -(-len(names) // columns) if len(names) > 1 - isinstance(one, Heatmap) else 0.0
    if height:
        figure.set_figheight(figure.get_figheight() + height / 72)  # keeps the axes' height
        # Add a space, because matplotlib leaves out names that begin with _.
        shown = [f" {name}" if name.startswith("_") else name for name in names]
        axes.legend(list(entries.values()), shown, loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=columns)
