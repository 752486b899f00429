"""Write figures for papers, each with its data as CSV. Identical charts give byte-identical files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from ....tracer.whole_file import whole_file, write_whole
from ...rows import Rows, to_csv
from ..chart import BarChart, Chart, Heatmap, LineChart
from ..targets import explained, local, refuse
from .figure import DPI, PLAIN, PaperStyle, Stack, draw, stack_of

_METADATA: dict[str, dict[str, str | None]] = {
    "png": {"Software": None},
    "svg": {"Creator": "tim-trace", "Date": None},
    "pdf": {"Creator": "tim-trace", "Producer": None, "CreationDate": None},
}
"""File metadata by format. Dates and versions are omitted, so that identical charts give identical files."""


def figures_of(charts: Sequence[Chart], series: Sequence[LineChart]) -> tuple[Chart, ...]:
    return (*((stack_of(series),) if series else ()), *(one for one in charts if not one.is_empty))


def write_figures(
    charts: Sequence[Chart], folder: str | os.PathLike[str], *kinds: str, style: PaperStyle = PLAIN, force: bool = False
) -> list[Path]:
    """Write each chart to `folder` in the formats `kinds` (png, svg, pdf), and its data as CSV. Each file is named
    after its chart's key. Return the paths. Raises FileThere if an output file exists and `force` is off, and
    StorageError if writing fails."""
    target = local(folder)
    paths = [target / f"{one.key}.{kind}" for one in charts for kind in (*kinds, "csv")]
    refuse(paths, force)
    with explained(folder):
        for one in charts:
            for kind in kinds:
                with whole_file(target / f"{one.key}.{kind}") as temporary, style.settings():
                    draw(one, style).savefig(temporary, format=kind, dpi=DPI, metadata=_METADATA[kind])
            text = "".join(f"{line}\n" for line in to_csv(rows_of(one)))
            # Write a lone surrogate (from a damaged name) as an escape sequence, because UTF-8 cannot encode it.
            write_whole(target / f"{one.key}.csv", text.encode("utf-8", "backslashreplace"))
    return sorted(paths)


_LINES = ("what", "line", "x", "y", "low", "high", "text")
_CELLS = ("what", "line", "x", "y", "x_low", "x_high", "y_low", "y_high", "tokens")
_BARS = ("group", "name", "value", "low", "high", "text")
_Row = tuple[object, ...]


def rows_of(one: Chart) -> Rows:
    if isinstance(one, Stack):
        return Rows(("chart", *_LINES), [(chart.key, *row) for chart in one.charts for row in _lines(chart)])
    if isinstance(one, Heatmap):
        return Rows(_CELLS, list(_heatmap(one)))
    if isinstance(one, BarChart):
        return Rows(_BARS, list(_bars(one)))
    assert isinstance(one, LineChart)
    return Rows(_LINES, list(_lines(one)))


def _lines(one: LineChart) -> Iterator[_Row]:
    for line in one.lines:
        yield from (("line", line.name, x, y, None, None, None) for x, y in _columns(line.x, line.y))
    for mark in one.marks:
        x, low, high = _numbers(mark.x, mark.low, mark.high)
        yield "mark", None, x, None, low, high, mark.text
    for band in one.bands:
        yield "band", None, None, None, *_numbers(band.low, band.high), band.text


def _heatmap(one: Heatmap) -> Iterator[_Row]:
    (row, column), x, y = np.nonzero(one.counts), one.x_edges, one.y_edges
    for cell in _columns(x[column], x[column + 1], y[row], y[row + 1], one.counts[row, column]):
        yield "cell", None, None, None, *cell
    for curve in one.curves:
        yield from (("line", curve.name, x, y, None, None, None, None, None) for x, y in _columns(curve.x, curve.y))


def _bars(one: BarChart) -> Iterator[_Row]:
    for group, bars in one.groups.items():
        yield from ((group, bar.name, *_numbers(bar.value, bar.low, bar.high), bar.text) for bar in bars)


def _columns(*columns: np.ndarray) -> Iterator[_Row]:
    return zip(*(np.asarray(column).tolist() for column in columns), strict=True)


def _numbers(*values: float | None) -> tuple[float | None, ...]:
    return tuple(np.asarray(value).item() for value in values)
