"""Named values side by side as a figure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..chart import Array, Share, Shares
from .legend import head
from .style import COLUMN, SMALL, colour, new_figure
from .text import plain
from .ticks import set_ticks

_HATCHES = ("", "////", "\\\\\\\\", "....")
_ROW, _BAR = 0.06, 0.085
"""Inches that a name takes, and each of its bars."""


def shares_figure(one: Shares) -> Figure:
    """A figure of the width of a column, as high as its names ask for; bars with their intervals where there are any."""
    names = list(dict.fromkeys(share.name for group in one.groups.values() for share in group))
    num_groups = max(len(one.groups), 1)
    figure = new_figure(COLUMN, 0.75 + len(names) * (_ROW + _BAR * num_groups))
    axes = figure.add_subplot()
    height = 0.8 / num_groups
    handles = {}
    for place, (group, shares) in enumerate(one.groups.items()):
        y = np.array([names.index(share.name) for share in shares], float) + height * (place - (num_groups - 1) / 2)
        value = np.array([share.value for share in shares], float)
        handles[group] = axes.barh(
            y, np.where(np.isfinite(value), value, 0.0), height * 0.86, facecolor=(colour(place), 0.75),
            edgecolor=colour(place), hatch=_HATCHES[place % len(_HATCHES)], linewidth=0.5,
        )  # fmt: skip
        _intervals(axes, shares, y)
    axes.set_yticks(range(len(names)), [plain(name, 28) for name in names])
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0, labelsize=SMALL)
    axes.grid(False, axis="y")
    axes.axvline(0, color="black", linewidth=0.6)
    set_ticks(axes.xaxis)
    axes.set_xlabel(plain(one.x_label))
    head(axes, one.title, handles)
    return figure


def _intervals(axes: Axes, shares: Sequence[Share], y: Array) -> None:
    ends = np.array([(_or(share.low, np.nan), _or(share.high, np.nan)) for share in shares], float).reshape(-1, 2)
    known = np.isfinite(ends).all(axis=1)
    axes.hlines(y[known], ends[known, 0], ends[known, 1], color="#333333", linewidth=0.8)
    for side in (0, 1):
        axes.plot(ends[known, side], y[known], linestyle="none", marker="|", markersize=3, color="#333333")


def _or(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value
