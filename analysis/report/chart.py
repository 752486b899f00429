"""Chart data for the HTML page, paper figures and CSV files.

Shapes: n points per line. A heatmap has X columns and Y rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

Array = np.ndarray

LINEAR, LOG = "linear", "log"

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A7A00", "#888888")
"""Okabe and Ito's colour-blind-safe palette. Yellow is darkened to be visible on white."""

MARK = "#D55E00"

BAND = "#009E73"

_FEW = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    name: str
    x: Array
    y: Array
    """[n] float64. NaN marks a missing value."""
    is_side: bool = False

    @property
    def dots(self) -> Array:
        """[n] bool: True if a point is drawn as a dot. In a long line, only isolated points are drawn as dots."""
        known = np.isfinite(self.y)
        if len(self.x) <= _FEW:
            return np.asarray(known)
        return np.asarray(known & ~np.r_[False, known[:-1]] & ~np.r_[known[1:], False])


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    x: float
    low: float
    high: float
    """`low` to `high` is the confidence interval for `x`. Both equal `x` if the step is known exactly."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    low: float
    high: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    key: str
    """Unique name, used for the chart's file and for its element in the page."""
    title: str
    unit: str
    note: str
    sql: str
    remark: str = ""

    @property
    def is_empty(self) -> bool:
        """True if the chart has only a remark and nothing to draw."""
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class LineChart(Chart):
    lines: tuple[Line, ...]
    x_label: str
    x_scale: str = LINEAR
    y_scale: str = LINEAR
    marks: tuple[Mark, ...] = ()
    bands: tuple[Band, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Heatmap(Chart):
    x_label: str
    y_label: str
    x_edges: Array
    y_edges: Array
    counts: Array
    """[Y, X] int64. The outermost rows also count values outside the y axis."""
    curves: tuple[Line, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    name: str
    value: float
    low: float | None = None
    high: float | None = None
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BarChart(Chart):
    groups: Mapping[str, tuple[Bar, ...]]
    x_label: str

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(bar.name for bars in self.groups.values() for bar in bars))

    @property
    def is_empty(self) -> bool:
        return not any(self.groups.values())
