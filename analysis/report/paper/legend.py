"""What stands above the axes of a figure: its title, and below that what its colours are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes

from .style import SMALL
from .text import plain, wrapped

_LETTER = 0.56
"""Width of a letter over the font's size, about."""
_AXIS = 0.6
"""Inches that an axis with its ticks takes of the figure's width, about."""
_HANDLE = 6
"""Letters that the drawn part of an entry takes, with the room around it."""
_ROW = 1.32
"""Height of a row over the font's size."""


def head(axes: Axes, title: str, entries: Mapping[str, Any], *, always: bool = False) -> None:
    """Put a title above the axes, and between them a legend where there is more than one name, or `always`."""
    names = [plain(name, 46) for name in entries]
    figure = axes.get_figure(root=True)
    assert figure is not None
    width = figure.get_figwidth()
    columns = _columns(names, width)
    rows = -(-len(names) // columns) if len(names) > (0 if always else 1) else 0
    axes.set_title(wrapped(title, int((width - _AXIS) * 72 / (8 * _LETTER))), pad=4 + rows * SMALL * _ROW)
    if rows:
        figure.set_figheight(figure.get_figheight() + rows * SMALL * _ROW / 72)  # the axes keep their height
        axes.legend(
            list(entries.values()),
            [f" {name}" if name.startswith("_") else name for name in names],  # matplotlib leaves out names with _ in front
            loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=columns,
        )  # fmt: skip


def _columns(names: list[str], width: float) -> int:
    """As many columns as fit into a width in inches."""
    longest = max((len(name) for name in names), default=0) + _HANDLE
    return max(1, min(len(names) or 1, int((width - _AXIS) * 72 / (longest * SMALL * _LETTER))))
