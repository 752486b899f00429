"""tim-trace's own four alert rules. At each step they use only data up to that step. Measured accuracy:
docs/evidence/alerts.md.

Shapes: n values, one per step with a value.
"""

from __future__ import annotations

import warnings

import numpy as np

Array = np.ndarray

GAP = 0.06
"""Mean |d| of a step, in nats, above which the mismatch is large enough to bias a run."""
UNEQUAL = 0.05
"""Share of repeated responses with a different reward above which the rewards are reported as contradictory."""
RATE = 3.0
NORM = 4.0
TIMES = 3
"""Number of consecutive steps for which the mismatch or the gradient norm must exceed its level."""


def gap_bends(mean_abs_d: Array) -> Array:
    """Return [n] bool: True if mean |d| has exceeded GAP, i.e. is large enough to bias a run, for three consecutive
    steps."""
    return sustained(mean_abs_d > GAP, TIMES)


def rewards_contradict(unequal: Array) -> Array:
    """Return [n] bool: True if more than 5 % of the repeated responses got a different reward; see
    `repeats.unequal_rewards`."""
    return np.asarray(unequal > UNEQUAL)


def rate_jumps(learning_rate: Array) -> Array:
    """Return [n] bool: True if the learning rate exceeds RATE times its previous peak, i.e. the largest median over
    five consecutive earlier steps."""
    return np.asarray(learning_rate > RATE * np.fmax.accumulate(trailing_median(learning_rate, 5)))


def norm_jumps(grad_norm: Array) -> Array:
    """Return [n] bool: True if, for three consecutive steps, the gradient norm has exceeded NORM times its median over
    the 20 steps that ended 5 steps earlier."""
    values = logarithm(grad_norm)
    return sustained(values > trailing_median(values, 20, 5) + np.log(NORM), TIMES)


def sustained(flags: Array, times: int) -> Array:
    """Return [n] bool: True if the flag and the `times` - 1 flags before it are all true."""
    found = np.zeros(len(flags), bool)
    if len(flags) >= times:
        found[times - 1 :] = np.lib.stride_tricks.sliding_window_view(flags, times).all(axis=1)
    return found


def trailing_median(values: Array, window: int, gap: int = 0) -> Array:
    """Return the [n] median of `window` values, ending `gap` values before each value; NaN if there are fewer values or
    none is finite."""
    found = np.full(len(values), np.nan)
    if len(values) > window + gap:
        past = np.lib.stride_tricks.sliding_window_view(values, window)[: len(values) - window - gap]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # a window without a value is NaN
            found[window + gap :] = np.nanmedian(np.where(np.isfinite(past), past, np.nan), axis=1)
    return found


def logarithm(values: Array) -> Array:
    """Return [n] natural logarithms; NaN for values without a logarithm."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(values > 0, np.log(values), np.nan)
