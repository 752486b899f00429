"""tim-trace's own four alert rules, each from what was known at the step. docs/evidence/alerts.md says how often they were right.

Shapes: n values, one a step that has one.
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
"""Steps in a row that the gap and the norm have to stay."""


def gap_bends(mean_abs_d: Array) -> Array:
    """[n] bool: a mismatch that can bias a run, for three steps."""
    return sustained(mean_abs_d > GAP, TIMES)


def rewards_contradict(unequal: Array) -> Array:
    """[n] bool: a twentieth of the repeated responses earned another reward; `repeats.unequal_rewards`."""
    return np.asarray(unequal > UNEQUAL)


def rate_jumps(learning_rate: Array) -> Array:
    """[n] bool: the learning rate is three times its highest level so far, by medians of five steps before each."""
    return np.asarray(learning_rate > RATE * np.fmax.accumulate(trailing_median(learning_rate, 5)))


def norm_jumps(grad_norm: Array) -> Array:
    """[n] bool: the gradient norm is four times its median over 20 steps, which end 5 steps ago, for three steps."""
    values = logarithm(grad_norm)
    return sustained(values > trailing_median(values, 20, 5) + np.log(NORM), TIMES)


def sustained(flags: Array, times: int) -> Array:
    """[n] true where it was true `times` times in a row."""
    found = np.zeros(len(flags), bool)
    if len(flags) >= times:
        found[times - 1 :] = np.lib.stride_tricks.sliding_window_view(flags, times).all(axis=1)
    return found


def trailing_median(values: Array, window: int, gap: int = 0) -> Array:
    """[n] the median of `window` values that end `gap` values before each; NaN where there are fewer, or none finite."""
    found = np.full(len(values), np.nan)
    if len(values) > window + gap:
        past = np.lib.stride_tricks.sliding_window_view(values, window)[: len(values) - window - gap]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # a window without a value is NaN
            found[window + gap :] = np.nanmedian(np.where(np.isfinite(past), past, np.nan), axis=1)
    return found


def logarithm(values: Array) -> Array:
    """[n] natural logarithms; NaN where there is none."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(values > 0, np.log(values), np.nan)
