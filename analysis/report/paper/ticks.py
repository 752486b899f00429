"""Places and texts of ticks: short numbers, no power over a whole axis that stands far from what it multiplies."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

import numpy as np
from matplotlib.axis import Axis
from matplotlib.ticker import Formatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

_POWERS = str.maketrans("-0123456789", "\u207b\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079")


_PLAIN = re.compile(r"\u2212?\d+(\.\d+)?")


def number(value: float, *, as_power: bool) -> str:
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
        return number(float(x), as_power=smallest < 1e-3 or max(abs(low), abs(high)) > 5e4)

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
    return "1" if abs(away) < 1e-15 else f"1 {sign} {number(abs(away), as_power=True)}"


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
