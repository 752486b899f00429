"""Chart data, independent of drawing: shared by the HTML page, paper figures and CSV files.

Shapes: n points per line, B bins; a heatmap has X columns and Y rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

Array = np.ndarray

LINEAR, LOG = "linear", "log"

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A7A00", "#888888")
"""Okabe and Ito's palette, distinguishable with any form of colour blindness; its yellow is darkened to show on white."""

MARK = "#D55E00"
"""Colour of changes, and of the envelope over a density."""

BAND = "#009E73"
"""Colour for ranges published in papers."""

_FEW = 40
"""Lines with at most this many points are drawn with a dot at every point."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a chart, with its points from left to right."""

    name: str
    x: Array
    """[n]"""
    y: Array
    """[n] float64; NaN for a missing value."""
    is_side: bool = False
    """True for a secondary line, drawn thin and dashed."""

    @property
    def dots(self) -> Array:
        """Return an [n] bool mask of the points drawn as dots: every point of a short line; otherwise only points whose
        neighbours are missing, which no line segment reaches."""
        known = np.isfinite(self.y)
        if len(self.x) <= _FEW:
            return np.asarray(known)
        return np.asarray(known & ~np.r_[False, known[:-1]] & ~np.r_[known[1:], False])


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A change marked at a position on the x axis."""

    x: float
    low: float
    high: float
    """Upper end of the position's confidence interval, which begins at `low`; both equal `x` if the position is exact."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """A shaded range on the y axis."""

    low: float
    high: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Fields common to all charts."""

    key: str
    """Unique name of the chart, used for its file and for its element in the page."""
    title: str
    unit: str
    """Unit of the chart's values; empty if dimensionless."""
    note: str
    """Explanation of what the chart shows and how to read it, for a reader new to the term."""
    sql: str
    """SQL query that returns the chart's values, or a command that prints them."""
    remark: str = ""
    """Sentence shown next to the chart, for example about omitted data."""

    @property
    def is_empty(self) -> bool:
        """Return True if the chart has no data to draw, only a remark."""
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class LineChart(Chart):
    """A chart of lines with a common x axis."""

    lines: tuple[Line, ...]
    x_label: str
    x_scale: str = LINEAR
    y_scale: str = LINEAR
    marks: tuple[Mark, ...] = ()
    bands: tuple[Band, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Heatmap(Chart):
    """A chart of counts over two axes, drawn as colours."""

    x_label: str
    y_label: str
    x_edges: Array
    """[X + 1]"""
    y_edges: Array
    """[Y + 1]"""
    counts: Array
    """[Y, X]"""
    curves: tuple[Line, ...] = ()
    is_open: bool = False
    """True if the outermost rows also count the values beyond the ends of the y axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A named value with its confidence interval."""

    name: str
    value: float
    low: float | None = None
    high: float | None = None
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BarChart(Chart):
    """A chart of named values side by side, one colour per group."""

    groups: Mapping[str, tuple[Bar, ...]]
    x_label: str

    @property
    def names(self) -> tuple[str, ...]:
        """Return the distinct names of the bars, in order."""
        return tuple(dict.fromkeys(bar.name for bars in self.groups.values() for bar in bars))

    @property
    def is_empty(self) -> bool:
        """Return True if the chart has no bars."""
        return not any(self.groups.values())
