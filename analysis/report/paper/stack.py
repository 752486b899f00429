"""All series of a run over one axis of steps, as a chart and as a figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from matplotlib.figure import Figure

from ..chart import LINEAR, Chart, Lines
from .legend import head
from .lines import draw_lines
from .style import PAGE, SMALL, new_figure
from .text import plain, wrapped

_PANEL, _MOST = 0.62, 9.0
"""Inches: height of a series, and of all of them on a page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack(Chart):
    """Series one under the other."""

    charts: tuple[Lines, ...]


def stack_of(series: Sequence[Lines]) -> Stack:
    """The overview of a run."""
    return Stack(
        key="run", title="The run by step", unit="", sql="", charts=tuple(replace(chart, x_scale=LINEAR) for chart in series),
        note="Every series that moves, over one axis of steps. Dashed lines: where a series changed, with the interval of it.",
    )  # fmt: skip


def stack_figure(one: Stack) -> Figure:
    """A figure of the width of a page: a panel a series, a line of one name in one colour everywhere."""
    num = max(len(one.charts), 1)
    figure = new_figure(PAGE, min(0.6 + _PANEL * num, _MOST))
    figure.get_layout_engine().set(hspace=0.0, h_pad=0.015)  # type: ignore[union-attr,call-arg]
    places: dict[str, int] = {}
    for line in (line for chart in one.charts for line in chart.lines):
        places.setdefault(line.name, len(places))
    handles = {}
    panels = figure.subplots(num, 1, sharex=True, squeeze=False)[:, 0]
    for axes, chart in zip(panels, one.charts, strict=False):
        drawn = draw_lines(axes, chart, places, most_ticks=4)
        handles.update({name: drawn[name] for name in places if name in drawn})
        label = wrapped(chart.title, 22, 2) + (f"\n{plain(chart.unit, 22)}" if chart.unit else "")
        axes.set_ylabel(label, rotation=0, ha="right", va="center", fontsize=SMALL)
    for axes in panels[:-1]:
        axes.tick_params(axis="x", which="both", length=0)
    head(panels[0], one.title, handles)
    figure.align_ylabels(panels)
    panels[-1].set_xlabel(plain(one.charts[-1].x_label) if one.charts else "")
    return figure
