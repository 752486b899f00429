"""tim-trace's own four alert rules, which use no later steps. Measured accuracy: docs/evidence/alerts.md.

Shapes: n values, one per step with a value.
"""

from __future__ import annotations

import warnings

import numpy as np

Array = np.ndarray

GAP = 0.06
"""Mean |d|, nats."""
UNEQUAL = 0.05
"""Share of repeated responses."""
RATE = 3.0
NORM = 4.0
TIMES = 3
"""Consecutive steps that the mismatch and the norm must stay beyond their level."""


def gap_bends(mean_abs_d: Array) -> Array:
    """Return [n] bool: mean |d| above GAP, large enough to bias a run, for three steps."""
    return sustained(mean_abs_d > GAP, TIMES)


def rewards_contradict(unequal: Array) -> Array:
    """Return [n] bool: more than 5 % of the repeated responses got a different reward; see `repeats.unequal_rewards`."""
    return np.asarray(unequal > UNEQUAL)


def rate_jumps(learning_rate: Array) -> Array:
    """Return [n] bool: the learning rate exceeds RATE times its highest level so far, by medians of the five steps before."""
    return np.asarray(learning_rate > RATE * np.fmax.accumulate(trailing_median(learning_rate, 5)))


def norm_jumps(grad_norm: Array) -> Array:
    """Return [n] bool: the gradient norm exceeds NORM times its median over 20 steps ending 5 steps ago, for three steps."""
    values = logarithm(grad_norm)
    return sustained(values > trailing_median(values, 20, 5) + np.log(NORM), TIMES)


def sustained(flags: Array, times: int) -> Array:
    """Return [n] bool: True if the flag was true for the last `times` values."""
    found = np.zeros(len(flags), bool)
    if len(flags) >= times:
        found[times - 1 :] = np.lib.stride_tricks.sliding_window_view(flags, times).all(axis=1)
    return found


def trailing_median(values: Array, window: int, gap: int = 0) -> Array:
    """Return the [n] median of the `window` values ending `gap` values before each; NaN if fewer, or none finite."""
    found = np.full(len(values), np.nan)
    if len(values) > window + gap:
        past = np.lib.stride_tricks.sliding_window_view(values, window)[: len(values) - window - gap]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # a window without a value is NaN
            found[window + gap :] = np.nanmedian(np.where(np.isfinite(past), past, np.nan), axis=1)
    return found


def logarithm(values: Array) -> Array:
    """Return [n] natural logarithms; NaN if undefined."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(values > 0, np.log(values), np.nan)
