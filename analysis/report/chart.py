"""The content of a figure, independent of how it is drawn: the page, papers and CSV files share these charts.

Shapes: n points of a line, B bins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

Array = np.ndarray

LINEAR, LOG = "linear", "log"

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A7A00", "#888888")
"""Okabe and Ito's colours, distinct with any colour vision; yellow is darkened to be visible on white."""

MARK = "#D55E00"
"""Colour of changes, and of the envelope over a density."""

BAND = "#009E73"
"""Colour of published ranges."""

_FEW = 40
"""Lines with at most this many points have a dot at each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line of points, from left to right."""

    name: str
    x: Array
    """[n]"""
    y: Array
    """[n] float64; NaN for a missing value."""
    is_side: bool = False
    """True for a secondary line, drawn thin and dashed."""

    @property
    def dots(self) -> Array:
        """[n] bool: points drawn as dots: all points of a short line, else isolated points, which no segment reaches."""
        known = np.isfinite(self.y)
        if len(self.x) <= _FEW:
            return np.asarray(known)
        return np.asarray(known & ~np.r_[False, known[:-1]] & ~np.r_[known[1:], False])


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A change at a position on the x axis."""

    x: float
    low: float
    high: float
    """Interval of the position, from `low`; both equal x if it is exact."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """A range of the y axis."""

    low: float
    high: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Fields common to all figures."""

    key: str
    """Name of its file and of its element in the page."""
    title: str
    unit: str
    """Unit of the values; empty if dimensionless."""
    note: str
    """What it shows and how to read it, for a reader new to the term."""
    sql: str
    """A query for its values, or the command that prints them."""
    remark: str = ""
    """A sentence shown next to it, such as what it omits."""

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to draw, only a remark."""
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class LineChart(Chart):
    """Values over an axis."""

    lines: tuple[Line, ...]
    x_label: str
    x_scale: str = LINEAR
    y_scale: str = LINEAR
    marks: tuple[Mark, ...] = ()
    bands: tuple[Band, ...] = ()
    by_step: Mapping[int, tuple[Array, ...]] = field(default_factory=dict)
    """Step -> the y of each line at this step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heatmap(Chart):
    """Counts over two axes."""

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
    """True if the outermost rows include everything beyond the y axis."""
    by_step: Mapping[int, Array] = field(default_factory=dict)
    """Step -> [Y, X] at this step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HistogramChart(Chart):
    """Counts over one axis, drawn on a logarithmic scale."""

    x_label: str
    edges: Array
    """[B + 1]"""
    counts: Mapping[str, Array]
    """Name -> [B]"""
    is_open: bool = False
    """True if the outermost bins include everything beyond the axis."""
    by_step: Mapping[int, Mapping[str, Array]] = field(default_factory=dict)
    """Step -> the counts at this step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A named value with its interval."""

    name: str
    value: float
    low: float | None = None
    high: float | None = None
    text: str = ""
    """The value in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BarChart(Chart):
    """Named values side by side, in groups of one colour."""

    groups: Mapping[str, tuple[Bar, ...]]
    x_label: str

    @property
    def names(self) -> tuple[str, ...]:
        """Distinct names of the bars, in order."""
        return tuple(dict.fromkeys(bar.name for bars in self.groups.values() for bar in bars))

    @property
    def is_empty(self) -> bool:
        """True if there is no bar."""
        return not any(self.groups.values())
