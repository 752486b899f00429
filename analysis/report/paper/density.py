"""Counts over two axes as a figure."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.collections import PolyCollection
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from ..chart import Density
from ..colours import MARK
from .legend import head
from .style import COLUMN, dash, new_figure
from .text import plain
from .ticks import set_ticks


def density_figure(one: Density) -> Figure:
    """A figure of the width of a column: a cell is coloured by the decimal logarithm of its tokens, and empty at 0."""
    figure = new_figure(COLUMN, 2.7)
    axes = figure.add_subplot()
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
    set_ticks(axes.xaxis)
    set_ticks(axes.yaxis)
    axes.set(xlabel=plain(one.x_label), ylabel=plain(one.y_label, 40))
    bar = figure.colorbar(cells, ax=axes, aspect=28, pad=0.02)
    set_ticks(bar.ax.yaxis)
    bar.set_label(plain(one.unit, 30))
    assert bar.solids is not None
    bar.solids.set(rasterized=False, edgecolor="face", linewidth=0.2)
    bar.outline.set_linewidth(0.4)  # type: ignore[operator]  # matplotlib types it as what draws it
    head(axes, one.title, curves, always=True)
    return figure
