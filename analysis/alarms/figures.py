"""Alert rules. At each step, they use only data up to that step (docs/evidence/alerts.md). Shapes: n steps with a
value, N sequences."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import numpy as np

from ..check.sample import read_pair_sums
from ..facts.read_series import ESTIMATED, read_averages, read_series
from ..facts.series import KINDS, MISMATCH, Series
from ..statistics.estimators import Array
from ..trace.database import Database
from ..trace.pair_sums import COUNTS, SUM_EXP_ABS_D
from ..trace.source import Pair
from ..trace.tokens import tokens_by_step
from .repeats import Repeats

Figure = tuple[np.ndarray, Array]
"""A metric as (steps, values), sorted by step."""

OF_TOKENS = ("prob_diff_mean", "mean_exp_abs_d")
"""Metrics that `read_series` does not return. They are computed from tokens."""
NEEDED_SUMS = (*COUNTS, "sum_prob_diff", SUM_EXP_ABS_D)
NOT_FINITE = "num_not_finite"
"""Metric: number of loss tokens per step with a NaN or infinite logprob in either pass."""


def read_token_figures(database: Database, pair: Pair) -> dict[str, Figure]:
    """Read three metrics per step from tokens: num_not_finite, prob_diff_mean and mean_exp_abs_d.

    With logprobs a and b of a token in the two passes, prob_diff_mean is the mean of |exp(a) - exp(b)|, and
    mean_exp_abs_d the mean of exp(|d|). These means cover the same tokens as `read_series`. For a run without tokens,
    return the logged averages instead (see `read_averages`).
    """
    if not tokens_by_step(database):
        return read_averages(database)
    sums = read_pair_sums(database, pair, NEEDED_SUMS)
    return token_figures(sums.steps, sums.columns)


def token_figures(steps_N: np.ndarray, sums: Mapping[str, np.ndarray]) -> dict[str, Figure]:
    """Compute the metrics of `read_token_figures` from the step and the sums (NEEDED_SUMS) of each sequence."""
    every, place_N = np.unique(steps_N, return_inverse=True)
    lost_N = sums["num_nan"] + sums["num_inf"]
    lost = {NOT_FINITE: (every, np.bincount(place_N, lost_N).astype(np.float64))} if len(every) else {}
    full_N = sums["num_tokens"] > 0
    steps, place_N = np.unique(steps_N[full_N], return_inverse=True)
    if not len(steps):
        return lost
    n, *totals = (
        np.bincount(place_N, sums[name][full_N], len(steps)) for name in ("num_tokens", "sum_prob_diff", SUM_EXP_ABS_D)
    )
    return lost | {name: (steps, total / n) for name, total in zip(OF_TOKENS, totals, strict=True)}


UNEQUAL_REWARDS = "unequal_rewards"
"""Metric: share of repeated responses that got a different reward than last time (see repeats.py)."""

FIGURES = (*KINDS, *OF_TOKENS, NOT_FINITE, UNEQUAL_REWARDS)


def is_of_pair(name: str) -> bool:
    return name in OF_TOKENS or (name in KINDS and KINDS[name][0] == MISMATCH)


def read_figure(database: Database, pair: Pair, name: str) -> Figure | None:
    """Return the metric `name` (one of FIGURES) of the open run, or None if not recorded. Infinities become NaN."""
    if name in KINDS:
        series = read_series(database, pair=pair).get(name)
        if series is None:
            return None
        lost = np.isin(series.steps, series.not_finite)
        steps, values = series.steps, np.where(lost, np.nan, series.values)
        kept = (series.known | lost) & np.isin(steps, database.kept_steps.get(database.sources[0].run, steps))
        return steps[kept], values[kept]
    if name == UNEQUAL_REWARDS:
        repeats = Repeats()
        repeats.keep(database, ())
        return repeats.unequal()
    return read_token_figures(database, pair).get(name)


def figure(metric: str, series: Mapping[str, Series], of_tokens: Mapping[str, Figure]) -> Figure | None:
    """Return the steps and values of a metric, or None if it has no values or is only estimated.

    chi2_token is computed from other metrics. With w = exp(d): mean w = 1 + mean_d + k3, ess = (mean w)^2 / mean w^2,
    and chi2_token = mean w^2 - 1.
    """
    if metric in of_tokens:
        return of_tokens[metric]
    names = {"k1": ("mean_d",), "ess_token": ("ess",), "chi2_token": ("mean_d", "k3", "ess")}.get(metric, (metric,))
    # Published levels apply to the exact metric, not to estimates.
    if any(name not in series or series[name].source.startswith(ESTIMATED) for name in names):
        return None
    columns = {name: series[name].values for name in names}
    if "k3" in columns:  # infinite if exp(d) overflows (d above 709 nats), but a series omits infinite values
        k3 = series["k3"]
        columns["k3"] = np.where(np.isin(k3.steps, k3.not_finite), np.inf, k3.values)
    known = ~np.isnan([*columns.values()]).any(axis=0)
    if not known.any():
        return None
    found, *others = (column[known] for column in columns.values())
    if metric == "chi2_token":
        with np.errstate(divide="ignore", over="ignore"):
            found = (1 + found + others[0]) ** 2 / others[1] - 1
    return series[names[0]].steps[known], -found if metric == "k1" else found


GAP = 0.06
"""Mean |d| per step (nats) above which the mismatch can bias a run."""
UNEQUAL = 0.05
"""Rewards count as contradictory if more than this share of repeated responses get a different reward."""
RATE = 3.0
NORM = 4.0
TIMES = 3
"""A mismatch or gradient norm alert fires after this many consecutive steps above the level."""


def gap_bends(mean_abs_d: Array) -> np.ndarray:
    return sustained(mean_abs_d > GAP, TIMES)


def rewards_contradict(unequal: Array) -> np.ndarray:
    return np.asarray(unequal > UNEQUAL)


def rate_jumps(learning_rate: Array) -> np.ndarray:
    """Return [n] bool: True where the learning rate exceeds RATE times the largest median of any five consecutive
    earlier steps."""
    return np.asarray(learning_rate > RATE * np.fmax.accumulate(trailing_median(learning_rate, 5)))


def norm_jumps(grad_norm: Array) -> Array:
    """Return [n] bool: True where the gradient norm exceeds NORM times its trailing median for TIMES steps in a row.

    The median covers 20 steps and skips the 5 steps before the current one.
    """
    values = logarithm(grad_norm)
    return sustained(values > trailing_median(values, 20, 5) + np.log(NORM), TIMES)


def sustained(flags: np.ndarray, times: int) -> np.ndarray:
    found = np.zeros(len(flags), bool)
    if len(flags) >= times:
        found[times - 1 :] = np.lib.stride_tricks.sliding_window_view(flags, times).all(axis=1)
    return found


def trailing_median(values: Array, window: int, gap: int = 0) -> Array:
    """Return [n] trailing medians over `window` values, leaving out the `gap` values just before the current one.

    A median is NaN if there are too few earlier values.
    """
    found = np.full(len(values), np.nan)
    if len(values) > window + gap:
        past = np.lib.stride_tricks.sliding_window_view(values, window)[: len(values) - window - gap]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # the median of a window without values is NaN
            found[window + gap :] = np.nanmedian(np.where(np.isfinite(past), past, np.nan), axis=1)
    return found


def logarithm(values: Array) -> Array:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(values > 0, np.log(values), np.nan)
