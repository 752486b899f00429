"""The numbers of a figure as a table in long form, with all their digits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ...rows import Rows
from ..chart import Array, Chart, Density, Histogram, Line, Lines, Shares
from .stack import Stack

_LINES = ("what", "line", "x", "y", "low", "high", "text")
_DENSITY = ("what", "line", "x", "y", "x_low", "x_high", "y_low", "y_high", "tokens")
_HISTOGRAM = ("name", "low", "high", "tokens")
_SHARES = ("group", "name", "value", "low", "high", "text")

_Row = tuple[Any, ...]


def rows_of(one: Chart) -> Rows:
    """Everything that a figure shows, a row a point, cell, bin, bar, mark or band; NULL in columns that a row does not have.

    Lines: `what` is line (x, y), mark (x, low to high) or band (low to high of y). A stack has the chart's key before these.
    Density: `what` is cell, where it has tokens, or line. Histogram: a row a bin. Shares: a row a bar.
    """
    if isinstance(one, Stack):
        return Rows(("chart", *_LINES), [(chart.key, *row) for chart in one.charts for row in _lines(chart)])
    if isinstance(one, Density):
        return Rows(_DENSITY, list(_density(one)))
    if isinstance(one, Histogram):
        return Rows(_HISTOGRAM, list(_histogram(one)))
    if isinstance(one, Shares):
        shares = ((group, share) for group, shares in one.groups.items() for share in shares)
        rows = [(group, each.name, *_numbers(each.value, each.low, each.high), each.text) for group, each in shares]
        return Rows(_SHARES, rows)
    assert isinstance(one, Lines)
    return Rows(_LINES, list(_lines(one)))


def _lines(one: Lines) -> Iterator[_Row]:
    for line in one.lines:
        yield from (("line", line.name, x, y, None, None, None) for x, y in _points(line))
    for mark in one.marks:
        x, low, high = _numbers(mark.x, mark.low, mark.high)
        yield "mark", None, x, None, low, high, mark.text
    for band in one.bands:
        yield "band", None, None, None, *_numbers(band.low, band.high), band.text


def _density(one: Density) -> Iterator[_Row]:
    row, column = np.nonzero(one.counts)
    cells = _columns(
        one.x_edges[column], one.x_edges[column + 1], one.y_edges[row], one.y_edges[row + 1], one.counts[row, column]
    )
    yield from (("cell", None, None, None, *cell) for cell in cells)
    for curve in one.curves:
        yield from (("line", curve.name, x, y, None, None, None, None, None) for x, y in _points(curve))


def _histogram(one: Histogram) -> Iterator[_Row]:
    for name, counts in one.counts.items():
        yield from ((name, *each) for each in _columns(one.edges[:-1], one.edges[1:], counts))


def _points(line: Line) -> Iterator[_Row]:
    return _columns(line.x, line.y)


def _columns(*columns: Array) -> Iterator[_Row]:
    """Rows of Python's own numbers, which a CSV file writes with all their digits."""
    return zip(*(np.asarray(column).tolist() for column in columns), strict=True)


def _numbers(*values: float | None) -> tuple[float | None, ...]:
    return tuple(None if value is None else np.asarray(value).item() for value in values)
