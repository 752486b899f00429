"""How figures for papers look: widths, fonts, lines, and names and numbers as matplotlib draws them.

The default font is the one that matplotlib carries, so that a figure has the same bytes on every machine with that
matplotlib.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from matplotlib import style
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.ticker import Formatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from ....schemas.errors import InvalidOption
from ..chart import COLOURS

FONT = "DejaVu Sans"
WIDTHS: dict[str, tuple[float, float]] = {
    "column": (3.4, 7.0),
    "aaai": (3.3, 7.0),
    "acl": (3.03, 6.3),
    "acm": (3.33, 7.0),
    "iclr": (5.5, 5.5),
    "icml": (3.25, 6.75),
    "ieee": (3.5, 7.16),
    "jmlr": (6.0, 6.0),
    "nature": (3.5, 7.2),
    "neurips": (5.5, 5.5),
}
"""Name -> inches of a figure and of the overview of the run: a column and the whole width of the text."""
_NARROWEST, _WIDEST = 2.0, 20.0

DPI = 200

SMALL = 6.5
"""Points: ticks, legends and labels of marks; everything else has 8."""

DASHES: tuple[Any, ...] = ("solid", (0, (4, 1.6)), (0, (1.2, 1.6)), (0, (6, 1.6, 1.2, 1.6)), (0, (2.2, 1.6)))
"""As many as have no divisor in common with the colours, so that 40 lines differ in one or the other."""

_SETTINGS = {
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
    # Outlines: an SVG looks the same where the font is missing.
    "svg.fonttype": "path",
    "svg.hashsalt": "tim-trace",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperStyle:
    """What a reader chooses of a figure's look."""

    column: float = WIDTHS["column"][0]
    """Width of a figure, inches."""
    page: float = WIDTHS["column"][1]
    """Width of the overview of the run, inches."""
    font: str = FONT
    """A font of this machine; characters that it lacks are drawn in DejaVu Sans."""
    title: bool = False
    """Whether a figure has its title above it; a paper has it in the caption."""

    def settings(self) -> AbstractContextManager[None]:
        """Hold matplotlib's settings while a figure is made or written; the reader's own are as before at the end."""
        return style.context(_SETTINGS | {"font.family": list(dict.fromkeys([self.font, FONT]))}, after_reset=True)


def paper_style(width: str | float = "column", font: str = FONT, title: bool = False) -> PaperStyle:
    """The style of a width in inches or of `WIDTHS`, and of a font. Raises InvalidOption."""
    column, page = WIDTHS[width] if width in WIDTHS else _inches(width)
    try:
        findfont(FontProperties(family=[font]), fallback_to_default=False)
    except ValueError as error:
        raise InvalidOption(
            f"got {font!r}, which is not installed; matplotlib always has {FONT} and DejaVu Serif", option="font"
        ) from error
    return PaperStyle(column=column, page=page, font=font, title=title)


def _inches(width: str | float) -> tuple[float, float]:
    try:
        inches = float(width)
    except (TypeError, ValueError):
        inches = math.nan
    if not _NARROWEST <= inches <= _WIDEST:
        known = ", ".join(WIDTHS)
        raise InvalidOption(
            f"got {width!r}; give inches from {_NARROWEST:g} to {_WIDEST:g}, or one of {known}", option="width"
        )
    return inches, inches


def new_figure(width: float, height: float) -> Figure:
    """An empty figure; inches."""
    return Figure(figsize=(width, height), layout="constrained")


def colour(place: int) -> str:
    """Colour of the line or group at a place."""
    return COLOURS[place % len(COLOURS)]


def dash(place: int, *, is_side: bool = False) -> Any:
    """Dashes of the line at a place; a line that stands beside others is never solid."""
    return DASHES[1 + (place + place // len(COLOURS)) % (len(DASHES) - 1)] if is_side else DASHES[place % len(DASHES)]


# --- names of runs and metrics, which may hold anything -----------------------------------------------------------------


def plain(text: str, most: int = 60) -> str:
    """One line of text without formulas, cut in its middle to `most` characters.

    A character that the default font lacks, or that cannot be seen, is written as its number; the CSV has it as it is.
    """
    return _without_formulas(_one_line(text, most))


def wrapped(text: str, width: int, most_lines: int = 3) -> str:
    """Text as plain() gives it, broken into at most `most_lines` lines of `width` characters."""
    lines = textwrap.wrap(_one_line(text, width * most_lines), width)
    return _without_formulas("\n".join(lines[:most_lines]))


def _one_line(text: str, most: int) -> str:
    shown = "".join(_shown(character) for character in " ".join(text.split()))
    if len(shown) <= most:
        return shown
    head = (most - 2) // 2
    return f"{shown[:head]}...{shown[len(shown) - (most - 3 - head) :]}"


def _without_formulas(text: str) -> str:
    return text.replace("$", r"\$")  # what stands between two of them would be one


def _shown(character: str) -> str:
    number = ord(character)
    if number in _glyphs() and character.isprintable():
        return character
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


@cache
def _glyphs() -> frozenset[int]:
    return frozenset(get_font(findfont(FONT)).get_charmap())


# --- ticks: short numbers, no power over a whole axis that stands far from what it multiplies ---------------------------

_POWERS = str.maketrans("-0123456789", "\u207b\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079")
_PLAIN = re.compile(r"\u2212?\d+(\.\d+)?")


def tick_number(value: float, *, as_power: bool) -> str:
    """A tick's number: 0.05, or 5 times a power of ten."""
    if not as_power or value == 0:
        return f"{value:.10g}".replace("-", "\u2212")
    power = math.floor(math.log10(abs(value)) + 1e-9)
    digits = f"{value / 10.0**power:.6g}".replace("-", "\u2212")
    ten = "10" + str(power).translate(_POWERS)
    return {"1": ten, "\u22121": f"\u2212{ten}"}.get(digits, f"{digits}\u00d7{ten}")


class Short(Formatter):
    """Numbers of one axis, all plain or all as powers of ten."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        low, high = sorted(self.axis.get_view_interval())  # type: ignore[union-attr]
        if abs(x) < 1e-9 * (high - low) and low <= 0 <= high:
            return "0"  # what rounding left of it
        if max(abs(1 - low), abs(1 - high)) < 1e-5:
            return _by_distance(float(x))
        smallest = low if self._is_log and low > 0 else max(abs(low), abs(high))
        return tick_number(float(x), as_power=smallest < 1e-3 or max(abs(low), abs(high)) > 5e4)

    def format_ticks(self, values: Iterable[float]) -> list[str]:
        """Numbers of one axis have one number of decimals, unless they lie powers of ten apart."""
        values = list(values)
        texts = super().format_ticks(values)
        if (self._is_log and max(values, default=0) > 9 * min(values, default=0)) or not all(
            _PLAIN.fullmatch(text) for text in texts
        ):
            return texts
        decimals = max((len(text.partition(".")[2]) for text in texts), default=0)
        return [_padded(text, decimals) for text in texts]

    @property
    def _is_log(self) -> bool:
        return bool(self.axis.get_scale() == "log")  # type: ignore[union-attr]


def _by_distance(value: float) -> str:
    """A number whose digits are all nines, by what it lacks to 1."""
    away = float(f"{1 - value:.3g}")
    sign = "\u2212" if away > 0 else "+"
    return "1" if abs(away) < 1e-15 else f"1 {sign} {tick_number(abs(away), as_power=True)}"


def _padded(text: str, decimals: int) -> str:
    whole, _, part = text.partition(".")
    return f"{whole}.{part.ljust(decimals, '0')}" if decimals else whole


def set_ticks(axis: Axis, most: int = 6, *, integer: bool = False) -> None:
    """Put ticks on an axis whose ends are known: on a logarithmic one at powers of ten, where it has enough of them."""
    low, high = sorted(axis.get_view_interval())
    linear: Any = MaxNLocator(nbins=most, integer=integer, steps=[1, 2, 2.5, 5, 10])
    if axis.get_scale() != "log":
        axis.set_major_locator(linear)
    else:
        decades = float(np.log10(high) - np.log10(low))
        if decades < 0.6:
            axis.set_major_locator(linear)
        else:
            axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if decades < 1.7 else (1.0,), numticks=most))
        axis.set_minor_locator(LogLocator(subs=range(2, 10), numticks=99) if 0.6 <= decades < 6 else NullLocator())
        axis.set_minor_formatter(NullFormatter())
    axis.set_major_formatter(Short())
