"""Figures for papers as files, each with its numbers as CSV. The same charts give the same bytes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_pdf import PdfPages
from matplotlib.figure import Figure

from ....tracer.whole_file import whole_file, write_whole
from ...rows import Rows, to_csv
from ..chart import BarChart, Chart, Heatmap, HistogramChart, Line, LineChart
from ..targets import explained, local, refuse
from .marks import Stack, draw, stack_of
from .style import DPI, PaperStyle, plain, wrapped

_METADATA: dict[str, dict[str, str | None]] = {
    "png": {"Software": None},
    "svg": {"Creator": "tim-trace", "Date": None},
    "pdf": {"Creator": "tim-trace", "Producer": None, "CreationDate": None},
}
"""Kind of a file -> what it says of itself: nothing that changes from day to day."""


def figures_of(charts: Sequence[Chart], series: Sequence[LineChart]) -> tuple[Chart, ...]:
    """The charts of a report, `report.charts`, after an overview of its series, `report.run`."""
    return (*((stack_of(series),) if series else ()), *(one for one in charts if not one.is_empty))


def write_figures(
    charts: Sequence[Chart],
    folder: str | os.PathLike[str],
    *kinds: str,
    style: PaperStyle | None = None,
    force: bool = False,
) -> list[Path]:
    """Write each chart as KEY.png of 200 dots an inch, KEY.svg or KEY.pdf, and KEY.csv into a folder; return their paths.

    Raises FileThere when one of these files is there already, unless `force` replaces it; StorageError.
    """
    target = local(folder)
    paths = [target / f"{one.key}.{kind}" for one in charts for kind in (*kinds, "csv")]
    refuse(paths, force)
    style = style or PaperStyle()
    with explained(folder):
        for one in charts:
            for kind in kinds:
                with whole_file(target / f"{one.key}.{kind}") as temporary, style.settings():
                    draw(one, style).savefig(temporary, format=kind, dpi=DPI, metadata=_METADATA[kind])
            _write_csv(one, target / f"{one.key}.csv")
    return sorted(paths)


def write_pdf(
    charts: Sequence[Chart],
    path: str | os.PathLike[str],
    *,
    title: str = "",
    style: PaperStyle | None = None,
    force: bool = False,
) -> list[Path]:
    """Write a PDF of vectors, a page a chart in its own size after a page with the title and the list of the charts, and
    their numbers as KEY.csv into a folder beside it (figures.pdf: figures-data); return the paths, the PDF first.

    Raises FileThere when one of these files is there already, unless `force` replaces it; StorageError.
    """
    target = local(path)
    folder = target.with_name(f"{target.stem}-data")
    tables = [folder / f"{one.key}.csv" for one in charts]
    refuse([target, *tables], force)
    style = style or PaperStyle()
    with explained(path):
        about = _METADATA["pdf"] | {"Title": title or None}
        with whole_file(target) as temporary, style.settings(), PdfPages(temporary, metadata=about) as pages:
            pages.savefig(_cover(charts, title, folder.name))
            for one in charts:
                pages.savefig(draw(one, style))
        for one, table in zip(charts, tables, strict=True):
            _write_csv(one, table)
    return [target, *tables]


_COVER, _ROW = 7.0, 0.17
"""Inches: width of the first page of a PDF, and height of its lines."""


def _cover(charts: Sequence[Chart], title: str, data: str) -> Figure:
    """A page with the title, and below it a line a figure: its page, its title and its file in the folder `data`."""
    heading = wrapped(title or "Figures", 80, 4)
    height = 0.6 + _ROW * (len(charts) + 2 + 1.5 * (heading.count("\n") + 1))
    figure = Figure(figsize=(_COVER, height))
    lines = [
        (f"{page}", plain(one.title, 64), plain(f"{data}/{one.key}.csv", 48)) for page, one in enumerate(charts, 2)
    ]
    at = height - 0.3
    figure.text(0.3 / _COVER, at / height, heading, fontsize=10, va="top", linespacing=1.2)
    at -= _ROW * (1.5 * (heading.count("\n") + 1) + 0.5)
    for line in [("page", "figure", "its numbers"), *lines]:
        for left, text in zip((0.3, 0.75, 4.3), line, strict=True):
            figure.text(left / _COVER, at / height, text, fontsize=7, va="top")
        at -= _ROW
    return figure


def _write_csv(one: Chart, path: Path) -> None:
    text = "".join(f"{line}\n" for line in to_csv(rows_of(one)))
    # Half a pair of UTF-16, as a damaged name may hold it, is no UTF-8.
    write_whole(path, text.encode("utf-8", "backslashreplace"))


_LINES = ("what", "line", "x", "y", "low", "high", "text")
_HEATMAP = ("what", "line", "x", "y", "x_low", "x_high", "y_low", "y_high", "tokens")
_HISTOGRAM = ("name", "low", "high", "tokens", "beyond")
_BARS = ("group", "name", "value", "low", "high", "text")

_Row = tuple[Any, ...]


def rows_of(one: Chart) -> Rows:
    """Everything that a figure shows, a row a point, cell, bin, bar, mark or band; NULL in columns that a row does not have.

    Lines: `what` is line (x, y), mark (x, low to high) or band (low to high of y). A stack has the chart's key before these.
    Heatmap: `what` is cell, where it has tokens, or line. Histogram: a row a bin, of which `beyond` is below or above where it
    holds everything outside the axis as well. Bar chart: a row a bar.
    """
    if isinstance(one, Stack):
        return Rows(("chart", *_LINES), [(chart.key, *row) for chart in one.charts for row in _lines(chart)])
    if isinstance(one, Heatmap):
        return Rows(_HEATMAP, list(_heatmap(one)))
    if isinstance(one, HistogramChart):
        return Rows(_HISTOGRAM, list(_histogram(one)))
    if isinstance(one, BarChart):
        bars = ((group, bar) for group, bars in one.groups.items() for bar in bars)
        return Rows(
            _BARS, [(group, bar.name, *_numbers(bar.value, bar.low, bar.high), bar.text) for group, bar in bars]
        )
    assert isinstance(one, LineChart)
    return Rows(_LINES, list(_lines(one)))


def _lines(one: LineChart) -> Iterator[_Row]:
    for line in one.lines:
        yield from (("line", line.name, x, y, None, None, None) for x, y in _points(line))
    for mark in one.marks:
        x, low, high = _numbers(mark.x, mark.low, mark.high)
        yield "mark", None, x, None, low, high, mark.text
    for band in one.bands:
        yield "band", None, None, None, *_numbers(band.low, band.high), band.text


def _heatmap(one: Heatmap) -> Iterator[_Row]:
    row, column = np.nonzero(one.counts)
    cells = _columns(
        one.x_edges[column], one.x_edges[column + 1], one.y_edges[row], one.y_edges[row + 1], one.counts[row, column]
    )
    yield from (("cell", None, None, None, *cell) for cell in cells)
    for curve in one.curves:
        yield from (("line", curve.name, x, y, None, None, None, None, None) for x, y in _points(curve))


def _histogram(one: HistogramChart) -> Iterator[_Row]:
    beyond: list[str | None] = [None] * (len(one.edges) - 1)
    if one.is_open:
        beyond[0], beyond[-1] = "below", "above"
    for name, counts in one.counts.items():
        yield from ((name, *each) for each in _columns(one.edges[:-1], one.edges[1:], counts, beyond))


def _points(line: Line) -> Iterator[_Row]:
    return _columns(line.x, line.y)


def _columns(*columns: Any) -> Iterator[_Row]:
    """Rows of Python's own numbers, which a CSV file writes with all their digits."""
    return zip(*(np.asarray(column).tolist() for column in columns), strict=True)


def _numbers(*values: float | None) -> tuple[float | None, ...]:
    return tuple(None if value is None else np.asarray(value).item() for value in values)
