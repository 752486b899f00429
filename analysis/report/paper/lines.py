"""Values over an axis as a figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..chart import LOG, Array, Band, Line, Lines, Mark
from ..colours import BAND, MARK
from .legend import head
from .style import COLUMN, SMALL, colour, dash, new_figure
from .text import plain
from .ticks import set_ticks

_FEW = 40
"""Of so few points each has a dot."""


def lines_figure(one: Lines) -> Figure:
    """A figure of the width of a column."""
    figure = new_figure(COLUMN, 2.1)
    axes = figure.add_subplot()
    handles = draw_lines(axes, one)
    axes.set_xlabel(plain(one.x_label))
    axes.set_ylabel(plain(one.unit, 30))
    head(axes, one.title, handles)
    return figure


def draw_lines(axes: Axes, one: Lines, places: Mapping[str, int] | None = None, most_ticks: int = 6) -> dict[str, Any]:
    """Draw lines, marks and bands, and give what a legend says: name -> what was drawn.

    Lines take the colours of their place in the chart, or in `places` where that has their name.
    """
    _scale(axes, one)
    handles = {}
    for place, line in enumerate(one.lines):
        handles[line.name] = _draw(axes, line, (places or {}).get(line.name, place))
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
    draw_marks(axes, one.marks)
    return handles


def _scale(axes: Axes, one: Lines) -> None:
    """Set the axes before anything is drawn. A logarithmic axis of nothing above 0 would have no ends, so it stays linear."""
    if one.x_scale == LOG and _has_positive([line.x for line in one.lines]):
        axes.set_xscale("log")
    if one.y_scale == LOG and _has_positive([line.y for line in one.lines]):
        axes.set_yscale("log")


def _has_positive(values: Sequence[Array]) -> bool:
    return any(bool((each[np.isfinite(each)] > 0).any()) for each in values)


def _draw(axes: Axes, line: Line, place: int) -> Any:
    x, y = line.x.astype(np.float64), np.where(np.isfinite(line.y), line.y, np.nan)
    width = 0.7 if line.is_side else 1.2
    (drawn,) = axes.plot(x, y, color=colour(place), linestyle=dash(place, is_side=line.is_side), linewidth=width)
    known = np.isfinite(y)
    alone = known & ~np.r_[False, known[:-1]] & ~np.r_[known[1:], False]  # a line does not show these
    dots = known if len(x) <= _FEW else alone
    if dots.any():
        axes.plot(
            x[dots], y[dots], linestyle="none", marker="o", markersize=1.6 if line.is_side else 2.4, color=colour(place)
        )
    return drawn


def _overlaps(band: Band, low: float, high: float) -> bool:
    return band.low <= high and band.high >= low


def draw_marks(axes: Axes, marks: Sequence[Mark]) -> None:
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
