"""What a figure shows, apart from how it is drawn: a page, a paper and a CSV file are made of the same chart.

Shapes: n points of a line, S steps that have values of their own, B bins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

Array = np.ndarray

LINEAR, LOG = "linear", "log"

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A7A00", "#888888")
"""Okabe and Ito's, the yellow darkened so that it is seen on white: told apart with any kind of colour vision."""

MARK = "#D55E00"
"""Of places at which something happened, and of the envelope over a density."""

BAND = "#009E73"
"""Of ranges that were published."""

_FEW = 40
"""Points of a line up to which each is marked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Points that belong together, from left to right."""

    name: str
    x: Array
    """[n]"""
    y: Array
    """[n] float64; NaN where there is no value."""
    is_side: bool = False
    """Whether it only stands beside the others, and is drawn thin and broken."""

    @property
    def dots(self) -> Array:
        """[n] bool points that are drawn as dots: all of a short line, else those without a neighbour, which a line hides."""
        known = np.isfinite(self.y)
        if len(self.x) <= _FEW:
            return np.asarray(known)
        return np.asarray(known & ~np.r_[False, known[:-1]] & ~np.r_[known[1:], False])


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A place on the x axis at which something happened."""

    x: float
    low: float
    high: float
    """The interval of the place; equal to x where it is sure."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """A range of the y axis."""

    low: float
    high: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """What every figure has."""

    key: str
    """Name of its file and of its place in the page."""
    title: str
    unit: str
    """Of the values; empty where they have none."""
    note: str
    """What it is and how it is read, for one who does not know the word."""
    sql: str
    """A query over the trace that gives its values, or the command that prints them."""
    remark: str = ""
    """A sentence that stands beside it: what it leaves out."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to draw, but only a remark to make."""
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
    """Step -> the y of each line at this step alone."""


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
    """Whether the outermost rows hold everything beyond the y axis as well."""
    by_step: Mapping[int, Array] = field(default_factory=dict)
    """Step -> [Y, X] at this step alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HistogramChart(Chart):
    """Counts over one axis, drawn on a logarithmic scale."""

    x_label: str
    edges: Array
    """[B + 1]"""
    counts: Mapping[str, Array]
    """Name -> [B]"""
    is_open: bool = False
    """Whether the outermost bins hold everything beyond the axis as well."""
    by_step: Mapping[int, Mapping[str, Array]] = field(default_factory=dict)
    """Step -> the counts at this step alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A named value with its interval."""

    name: str
    value: float
    low: float | None = None
    high: float | None = None
    text: str = ""
    """What it says, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BarChart(Chart):
    """Named values side by side, in groups: one a colour."""

    groups: Mapping[str, tuple[Bar, ...]]
    x_label: str

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the bars, each once, in order."""
        return tuple(dict.fromkeys(bar.name for bars in self.groups.values() for bar in bars))

    @property
    def is_empty(self) -> bool:
        """Whether there is no bar."""
        return not any(self.groups.values())
