"""A histogram as a figure."""

from __future__ import annotations

import numpy as np
from bokeh.models import ColumnDataSource, HoverTool
from bokeh.plotting import figure

from ..chart import Histogram
from ..colours import COLOURS
from .plain import LEFT, plain


def histogram(one: Histogram) -> figure:
    plot = figure(
        name=one.key, height=240, sizing_mode="stretch_width", y_axis_type="log", toolbar_location=None, tools="",
        x_axis_label=one.x_label, y_axis_label="tokens", min_border_left=LEFT,
    )  # fmt: skip
    edges = one.edges.astype(np.float64)
    for place, (name, counts) in enumerate(one.counts.items()):
        source = ColumnDataSource(
            {"left": edges[:-1], "right": edges[1:], "top": _tops(counts), "counts": counts.astype(np.float64)},
            name=f"{one.key}/{place}",
        )
        plot.quad(
            left="left", right="right", top="top", bottom=0.5, source=source, name=name, legend_label=name,
            color=COLOURS[place], fill_alpha=0.45 if place else 0.7, line_width=1,
            hatch_pattern=" " if place == 0 else "right_diagonal_line", hatch_color=COLOURS[place], hatch_alpha=0.7,
        )  # fmt: skip
    plot.add_tools(
        HoverTool(tooltips=[("", "$name"), ("ln ratio", "@left{0.0000} to @right{0.0000}"), ("tokens", "@counts{0,0}")])
    )
    return plain(plot)


def _tops(counts: np.ndarray) -> np.ndarray:
    """Where the bars of counts end: none is drawn for 0, and the axis begins at a half."""
    return np.where(counts > 0, counts, np.nan).astype(np.float64)
