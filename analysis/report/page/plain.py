"""What every figure has: room on its left, and nothing of its own behind it."""

from __future__ import annotations

from bokeh.models import CategoricalAxis, NoOverlap
from bokeh.plotting import figure

LEFT = 76
"""Pixels left of a frame, so that stacked figures stand one under the other."""
HOVER, CLICK = "timTrace.hover(cb_obj.x)", "timTrace.click(cb_obj.x)"
"""What the page does when a step is pointed at, and when it is chosen."""


def plain(plot: figure) -> figure:
    """Nothing of its own behind the figure: the page is light or dark."""
    plot.background_fill_alpha = 0
    plot.border_fill_alpha = 0
    plot.outline_line_alpha = 0
    plot.grid.grid_line_alpha = 0.25
    plot.axis.minor_tick_line_color = None
    for axis in plot.axis:
        if not isinstance(axis, CategoricalAxis):
            axis.major_label_policy = NoOverlap(min_distance=3)
    if plot.legend:
        plot.add_layout(plot.legend[0], "above")
        plot.legend.orientation = "horizontal"
        plot.legend.margin = 0
        plot.legend.background_fill_alpha = 0
        plot.legend.border_line_alpha = 0
        plot.legend.click_policy = "hide"
        plot.legend.label_text_font_size = "11px"
        plot.legend.spacing = 14
        plot.legend.padding = 2
    return plot
