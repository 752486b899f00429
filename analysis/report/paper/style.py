"""How figures for papers look: widths of columns, fonts, lines.

The font is the one that matplotlib carries, so that a figure has the same bytes on every machine with that matplotlib.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from matplotlib import style
from matplotlib.figure import Figure

from ..colours import COLOURS

COLUMN, PAGE = 3.4, 7.0
"""Inches: one column of a paper of two, and its whole width."""

DPI = 200

SMALL = 6.5
"""Points: ticks, legends and labels of marks; everything else has 8."""

DASHES: tuple[Any, ...] = ("solid", (0, (4, 1.6)), (0, (1.2, 1.6)), (0, (6, 1.6, 1.2, 1.6)), (0, (2.2, 1.6)))
"""As many as have no divisor in common with the colours, so that 40 lines differ in one or the other."""

_STYLE = {
    "font.family": ["DejaVu Sans"],
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.5,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.minor.width": 0.4,
    "ytick.minor.width": 0.4,
    "legend.fontsize": SMALL,
    "legend.frameon": False,
    "legend.handlelength": 1.8,
    "legend.columnspacing": 1.2,
    "legend.labelspacing": 0.25,
    "legend.borderpad": 0.1,
    "legend.borderaxespad": 0.2,
    "lines.solid_capstyle": "round",
    "lines.scale_dashes": False,
    "hatch.linewidth": 0.5,
    "text.usetex": False,
    "figure.dpi": DPI,
    "savefig.dpi": "figure",
    # TrueType, which journals ask for, and which can be edited.
    "pdf.fonttype": 42,
}


def paper_style() -> AbstractContextManager[None]:
    """Hold the style while a figure is made or written; the reader's own settings are as before at the end."""
    return style.context(_STYLE, after_reset=True)


def new_figure(width: float, height: float) -> Figure:
    """An empty figure; inches."""
    return Figure(figsize=(width, height), layout="constrained")


def colour(place: int) -> str:
    """Colour of the line or group at a place."""
    return COLOURS[place % len(COLOURS)]


def dash(place: int, *, is_side: bool = False) -> Any:
    """Dashes of the line at a place; a line that stands beside others is never solid."""
    return DASHES[1 + (place + place // len(COLOURS)) % (len(DASHES) - 1)] if is_side else DASHES[place % len(DASHES)]
