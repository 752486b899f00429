"""Counts over one axis as a figure."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from ..chart import Histogram
from .legend import head
from .style import COLUMN, colour, dash, new_figure
from .text import plain
from .ticks import set_ticks

_FLOOR = 0.5
"""Where the axis begins, so that a bin with one token has a height."""
_HATCHES = ("", "////", "\\\\\\\\", "....")


def histogram_figure(one: Histogram) -> Figure:
    """A figure of the width of a column; bars on a logarithmic axis, none for a bin without tokens."""
    figure = new_figure(COLUMN, 2.1)
    axes = figure.add_subplot()
    axes.set_yscale("log")
    handles = {}
    for place, (name, counts) in enumerate(one.counts.items()):
        tops = np.maximum(counts.astype(np.float64), _FLOOR)
        handles[name] = axes.stairs(
            tops, one.edges, baseline=_FLOOR, fill=True, facecolor=(colour(place), 0.35), edgecolor=(colour(place), 0.6),
            hatch=_HATCHES[place % len(_HATCHES)], linewidth=0,
        )  # fmt: skip
        axes.stairs(tops, one.edges, baseline=_FLOOR, color=colour(place), linestyle=dash(place), linewidth=0.9)
    highest = max((float(counts.max(initial=0)) for counts in one.counts.values()), default=0.0)
    axes.set(xlim=(one.edges[0], one.edges[-1]), ylim=(_FLOOR, max(highest, 5.0) * 2))
    set_ticks(axes.xaxis)
    set_ticks(axes.yaxis)
    axes.set(xlabel=plain(one.x_label), ylabel=plain(one.unit, 30))
    head(axes, one.title, handles)
    return figure
