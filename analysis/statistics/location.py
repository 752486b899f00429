"""Where exactly a series changes: a jump, or the first step of a ramp, with a confidence interval.

Shapes: n values of a stretch with one change in it, P places where it may be.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .change_points import StretchSquares

SHIFT, RAMP = "shift", "ramp"

_JUMP, _BOTH = "jump", "both"
"""A jump beside one slope, and a jump at which the slope changes, too."""

REACH = 7.35
"""What a form's cost may lie above the least of all within a 95 % interval, in long-run variances: (1 - exp(-x / 2))^2 = 0.95,
the limit law of a jump's likelihood ratio (Hinkley, Biometrika 57, 1970). The onset of a ramp, a regular parameter, would need
3.84, were its form and the variance known."""


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
    the second must bring ln(n). The interval holds the places of every form that fits about as well as the best one: a ramp
    that noise makes look like a jump began earlier.
    """
    n = len(values)
    places = np.arange(margin, n - margin + 1)
    lines = StretchSquares(values)
    whole = float(lines.squares(0, n))
    t = np.arange(n)
    squares = {
        _JUMP: whole - _gain(values, (t[:, None] >= places).astype(float)),
        RAMP: whole - _gain(values, np.maximum(t[:, None] - places + 1.0, 0.0)),
        _BOTH: lines.squares(0, places) + lines.squares(places, n),
    }
    price = {_JUMP: 0.0, RAMP: 0.0, _BOTH: float(np.log(n))}
    costs = {form: squares_P / variance + price[form] for form, squares_P in squares.items()}
    best = min(costs, key=lambda form: float(costs[form].min()))
    kind = RAMP if best == RAMP else SHIFT
    place, least = int(places[np.argmin(costs[best])]), float(costs[best].min())
    inside = places[np.min(list(costs.values()), axis=0) - least <= REACH]
    before, after = _ends(values, place, best)
    return Located(
        place=place, low=int(inside[0]), high=int(inside[-1]), kind=kind, before=before, after=after,
        gain=(whole - float(squares[_BOTH].min())) / variance,
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
        _JUMP: [later.astype(float)],
        RAMP: [np.maximum(t - place + 1, 0.0)],
        _BOTH: [later.astype(float), later * (t - place)],
    }[best]
    x = np.stack([np.ones_like(t), t, *extra], axis=1)
    fitted = x @ np.linalg.lstsq(x, values, rcond=None)[0]
    return float(fitted[place - 1]), float(fitted[-1])
