"""Locate a change in a series: a jump, or the start of a ramp, an exponential approach or a decline.

Shapes: n values in a segment with one change, P candidate positions, E candidate ends for a decline.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .change_points import StretchSquares
from .intervals import f_quantile
from .noise import long_run_variance

SHIFT, RAMP = "shift", "ramp"

_JUMP, _BOTH, _DECAY = "jump", "both", "decay"
"""Forms of a change: a jump at a constant slope, a jump with a change of slope, and an exponential approach to a new
level (as in a policy collapse)."""

_DECAYS = (0.03, 0.1, 0.3)

REACH = 7.35
"""A position is in the 95% interval if its cost exceeds the minimum by at most this, in units of the long-run variance.
The value solves (1 - exp(-x / 2))^2 = 0.95, from the limit law of a jump's likelihood ratio (Hinkley, Biometrika 57,
1970)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    place: int
    low: int
    high: int
    kind: str
    before: float
    after: float
    gain: float
    """Largest reduction of squared residuals by a change in slope and level, in units of the long-run variance."""


def locate(values: np.ndarray, variance: float, margin: int) -> Located:
    """Locate the change in a segment at least `margin` values from either end. A jump alone or a slope change alone has
    one parameter. A jump with a slope change, or an exponential approach to a new level, has two, and the second adds
    ln(n) to the cost of the fit. The interval covers every form that fits almost as well as the best, because noise can
    make a ramp look like a later jump."""
    n = len(values)
    places = np.arange(margin, n - margin + 1)
    lines = StretchSquares(values)
    whole = float(lines.squares(0, n))
    t = np.arange(n)
    decays = {share: _decay(t[:, None], places, share * n) for share in _DECAYS}
    gains_DP = np.stack([_gain(values, decay) for decay in decays.values()])
    squares = {
        _JUMP: whole - _gain(values, (t[:, None] >= places).astype(float)),
        RAMP: whole - _gain(values, np.maximum(t[:, None] - places + 1.0, 0.0)),
        _BOTH: lines.squares(0, places) + lines.squares(places, n),
        _DECAY: whole - gains_DP.max(axis=0),
    }
    price = {_JUMP: 0.0, RAMP: 0.0, _BOTH: float(np.log(n)), _DECAY: float(np.log(n))}
    costs = {form: squares_P / variance + price[form] for form, squares_P in squares.items()}
    best = min(costs, key=lambda form: float(costs[form].min()))
    kind = RAMP if best == RAMP else SHIFT
    place, least = int(places[np.argmin(costs[best])]), float(costs[best].min())
    inside = places[np.min(list(costs.values()), axis=0) - least <= REACH]
    length = _DECAYS[int(np.argmax(gains_DP[:, place - margin]))] * n
    before, after = _ends(values, place, best, length)
    return Located(
        place=place, low=int(inside[0]), high=int(inside[-1]), kind=kind, before=before, after=after,
        gain=(whole - float(squares[_BOTH].min())) / variance,
    )  # fmt: skip


def _decay(t: np.ndarray, places: np.ndarray | int, length: float) -> np.ndarray:
    return np.asarray(-np.expm1(-np.maximum(t - places + 1.0, 0.0) / length))


def _gain(values: np.ndarray, columns: np.ndarray) -> np.ndarray:
    t = np.arange(len(values)) - (len(values) - 1) / 2
    apart = columns - columns.mean(axis=0) - np.outer(t, t @ columns / max(float(t @ t), 1e-300))
    return np.asarray((values @ apart) ** 2 / np.maximum(np.einsum("ij,ij->j", apart, apart), 1e-300))


def _ends(values: np.ndarray, place: int, best: str, length: float) -> tuple[float, float]:
    t = np.arange(len(values), dtype=float)
    later = t >= place
    extra = {
        _JUMP: [later.astype(float)],
        RAMP: [np.maximum(t - place + 1, 0.0)],
        _BOTH: [later.astype(float), later * (t - place)],
        _DECAY: [_decay(t, place, length)],
    }[best]
    x = np.stack([np.ones_like(t), t, *extra], axis=1)
    fitted = x @ np.linalg.lstsq(x, values, rcond=None)[0]
    return float(fitted[place - 1]), float(fitted[-1])


_MAX_ENDS = 12


def break_between(values: np.ndarray, before: float, after: float) -> tuple[int, int, int]:
    """Return (low, index, high): the index at which a decline between two given levels starts, and the bounds of its
    90% interval. The interval contains every index that an F test (1 and n - 3 degrees of freedom) does not reject."""
    n = len(values)
    costs = np.full(n, np.inf)
    for i in range(n - 2):
        fallen_EN = _fallen(i, n)
        costs[i] = np.square(values - before * (1 - fallen_EN) - after * fallen_EN).sum(axis=1).min()
    freedom = max(n - 3, 1)
    inside = np.flatnonzero(costs <= costs.min() * (1 + f_quantile(0.90, 1, freedom) / freedom))
    return int(inside[0]), int(np.argmin(costs)), int(inside[-1])


def break_interval(values: np.ndarray, deviation: float) -> tuple[int, int]:
    """Return the 95% interval for a decline's start (coverage: docs/evidence/intervals.md). The levels
    before and after the decline are fitted. The noise may be autocorrelated. Its standard deviation is assumed to
    be at least `deviation`."""
    centred = values - values.mean()
    n = len(centred)
    costs, left = np.full(n, np.inf), centred
    for i in range(n - 2):
        fallen_EN = _fallen(i, n)
        fallen_EN -= fallen_EN.mean(axis=1, keepdims=True)
        size_E = fallen_EN @ centred / np.einsum("en,en->e", fallen_EN, fallen_EN)
        explained_E = size_E * (fallen_EN @ centred)
        best = int(np.argmax(explained_E))
        costs[i] = float(centred @ centred) - explained_E[best]
        if costs[i] <= costs.min():
            left = centred - size_E[best] * fallen_EN[best]
    variance = max(long_run_variance(left, 3), float(left @ left) / max(n - 4, 1), deviation**2)
    inside = np.flatnonzero(costs <= costs.min() + REACH * variance)
    return int(inside[0]), int(inside[-1])


def _fallen(start: int, n: int) -> np.ndarray:
    """Return the progress, from 0 to 1, of a linear decline from `start` to each candidate end, [E, n]."""
    ends = np.unique(np.linspace(start + 1, n - 1, min(n - 1 - start, _MAX_ENDS)).round().astype(int))
    return np.asarray(np.clip((np.arange(n) - start) / (ends[:, None] - start), 0.0, 1.0))
