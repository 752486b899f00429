"""A chart as a figure of matplotlib, whatever its kind."""

from __future__ import annotations

from matplotlib.figure import Figure

from ..chart import Chart, Density, Histogram, Lines, Shares
from .density import density_figure
from .histogram import histogram_figure
from .lines import lines_figure
from .shares import shares_figure
from .stack import Stack, stack_figure
from .style import paper_style


def draw(one: Chart) -> Figure:
    """Draw a chart. The figure belongs to no window and to no global state: `figure.savefig(path)` writes it."""
    with paper_style():
        if isinstance(one, Stack):
            return stack_figure(one)
        if isinstance(one, Density):
            return density_figure(one)
        if isinstance(one, Histogram):
            return histogram_figure(one)
        if isinstance(one, Shares):
            return shares_figure(one)
        assert isinstance(one, Lines)
        return lines_figure(one)
