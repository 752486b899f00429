"""Draw a series as a sparkline made of characters.

Shapes: n values, one per step; NaN if missing.
"""

from __future__ import annotations

import numpy as np

from ..facts.series import LENGTH, MISMATCH, OPTIMIZER, POLICY, Series

BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
ASCII = "_.:-=+*#"
"""Sparkline characters, lowest to highest, for terminals whose encoding lacks block characters."""
BROKEN = "!"
"""Character that marks a NaN or an infinity."""

_SPIKES = (MISMATCH, OPTIMIZER, LENGTH, POLICY)
"""Kinds of series whose neighbouring steps are merged by their most extreme value, so that spikes show; others by the mean."""


def spark(series: Series, width: int, characters: str = BLOCKS) -> str:
    """Draw all steps of a series in at most `width` characters, scaled to its range; empty without values.

    The smallest value maps to the lowest character and the largest to the highest; a constant series is drawn lowest. A
    character that covers several steps shows the worst for a mismatch (smallest ess, mean_d farthest from 0), the largest for
    optimizer, length and policy series, else the mean. A space is a missing value, `!` a NaN or infinity.
    """
    if not series.known.any():
        return BROKEN if len(series.not_finite) else ""
    values = joined(series, width)
    broken = np.array([each.any() for each in _split(np.isin(series.steps, series.not_finite), width)])
    known = values[np.isfinite(values)]
    low, extent = float(known.min()), float(np.ptp(known))
    levels = (
        (values - low) / extent if extent > 1e-12 * max(1.0, abs(low)) else np.where(np.isfinite(values), 0.0, np.nan)
    )
    return "".join(
        BROKEN
        if bad
        else " "
        if np.isnan(level)
        else characters[min(int(level * len(characters)), len(characters) - 1)]
        for level, bad in zip(levels, broken, strict=True)
    )


def joined(series: Series, width: int) -> np.ndarray:
    """Return [min(n, width)] values in the unit of the series, with neighbouring steps merged as in `spark`."""
    return np.array([_one(series, part[np.isfinite(part)]) for part in _split(series.scaled, width)])


def _split(values: np.ndarray, width: int) -> list[np.ndarray]:
    """Split values into one chunk per character; chunk lengths differ by at most one."""
    return np.array_split(values, min(len(values), max(width, 1)))


def _one(series: Series, known: np.ndarray) -> float:
    if not len(known):
        return float("nan")
    if series.name == "ess":
        return float(known.min())
    if series.name == "mean_d":
        return float(known[np.argmax(np.abs(known))])
    return float(known.max() if series.kind in _SPIKES else known.mean())
