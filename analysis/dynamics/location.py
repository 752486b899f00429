"""Where exactly a series changes: a jump, or the first step of a ramp, with a confidence interval.

Shapes: n values of a stretch with one change in it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .segments import Lines

SHIFT, RAMP = "shift", "ramp"

_REACH = {SHIFT: 7.35, RAMP: 3.84}
"""What the squares may lie above their least within a 95 % interval, in long-run variances. Of a jump:
(1 - exp(-x / 2))^2 = 0.95, the limit law of its likelihood ratio (Hinkley, Biometrika 57, 1970); of a ramp, whose onset
is a regular parameter: chi-square of one degree of freedom."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """One change within a stretch."""

    place: int
    """First value that the change moved."""
    low: int
    high: int
    kind: str
    """`shift` or `ramp`."""
    before: float
    """Fitted value just before the change."""
    after: float
    """Fitted value at the end of the stretch."""
    gain: float
    """What it takes off the squares of one line, in long-run variances, slope and level both free."""


def locate(values: np.ndarray, variance: float, margin: int) -> Located:
    """Find the one change of a stretch, at least `margin` values from its ends.

    A jump beside one slope, and a slope that changes without a jump, cost one parameter; both at once cost two, of which
    the second must bring ln(n).
    """
    n = len(values)
    places = np.arange(margin, n - margin + 1)
    lines = Lines(values)
    whole = float(lines.squares(0, n))
    t = np.arange(n)
    squares = {
        "jump": whole - _gain(values, (t[:, None] >= places).astype(float)),
        RAMP: whole - _gain(values, np.maximum(t[:, None] - places + 1.0, 0.0)),
        "both": lines.squares(0, places) + lines.squares(places, n),
    }
    price = {"jump": 0.0, RAMP: 0.0, "both": float(np.log(n))}
    best = min(squares, key=lambda name: float(squares[name].min()) / variance + price[name])
    kind = RAMP if best == RAMP else SHIFT
    place = int(places[np.argmin(squares[best])])
    inside = places[squares[best] - squares[best].min() <= _REACH[kind] * variance]
    before, after = _ends(values, place, best)
    return Located(
        place=place, low=int(inside[0]), high=int(inside[-1]), kind=kind, before=before, after=after,
        gain=(whole - float(squares["both"].min())) / variance,
    )  # fmt: skip


def _gain(values: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """[places] what each column, beside a line, takes off the squares."""
    t = np.arange(len(values)) - (len(values) - 1) / 2
    apart = columns - columns.mean(axis=0) - np.outer(t, t @ columns / max(float(t @ t), 1e-300))
    return np.asarray((values @ apart) ** 2 / np.maximum(np.einsum("ij,ij->j", apart, apart), 1e-300))


def _ends(values: np.ndarray, place: int, best: str) -> tuple[float, float]:
    """Fitted values just before the change and at the end."""
    t = np.arange(len(values), dtype=float)
    later = t >= place
    extra = {
        "jump": [later.astype(float)],
        RAMP: [np.maximum(t - place + 1, 0.0)],
        "both": [later.astype(float), later * (t - place)],
    }[best]
    x = np.stack([np.ones_like(t), t, *extra], axis=1)
    fitted = x @ np.linalg.lstsq(x, values, rcond=None)[0]
    return float(fitted[place - 1]), float(fitted[-1])
