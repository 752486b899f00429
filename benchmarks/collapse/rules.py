"""Published alert rules and our own, each evaluated at every step from the data up to it.

Shapes: n steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from tim_trace.analysis.alarms import figures as own
from tim_trace.analysis.alarms.figures import logarithm, sustained, trailing_median

Array = np.ndarray
Known = dict[str, Array]
"""[n] values per step by quantity; NaN if not recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """An alarm."""

    name: str
    source: str
    sounds: Callable[[Known], Array]
    """[n] bool, computed from the values up to each step."""


def _above(name: str, level: float) -> Callable[[Known], Array]:
    return lambda known: known[name] > level


def _below(name: str, level: float) -> Callable[[Known], Array]:
    return lambda known: known[name] < level


def _size_above(name: str, level: float) -> Callable[[Known], Array]:
    return lambda known: np.abs(known[name]) > level


def _outside(name: str, low: float, high: float) -> Callable[[Known], Array]:
    return lambda known: (known[name] < low) | (known[name] > high)


def _score(values: Array, window: int, *, frozen: bool) -> Array:
    """Return each value's distance [n] from the mean of earlier ones, in their standard deviations; the first `window`
    are 0.

    `frozen` always uses the first `window` values, otherwise the last `window` before each.
    """
    scores = np.zeros(len(values))
    for i in range(window, len(values)):
        past = values[:window] if frozen else values[i - window : i]
        past = past[np.isfinite(past)]
        if len(past) > 2 and past.std() > 0 and np.isfinite(values[i]):
            scores[i] = (values[i] - past.mean()) / past.std()
    return scores


def _surge(known: Known) -> Array:
    base = trailing_median(known["length"], 20, 5)
    high = known["length"] / base >= 2.0
    return np.array([high[max(i - 4, 0) : i + 1].sum() >= 3 for i in range(len(high))])


def _norm_drop(known: Known) -> Array:
    base = trailing_median(known["grad_norm"], 20, 5)
    return sustained(known["grad_norm"] < base * (0.02 / 0.07), 3)


def _over_frozen(known: Known) -> Array:
    values = known["grad_norm"]
    return (_score(values, 20, frozen=True) > 3) & (values > 1.5 * np.nanmean(values[:20]))


def _drift(name: str, size: float, window: int) -> Callable[[Known], Array]:
    def sounds(known: Known) -> Array:
        values = known[name]
        found = np.zeros(len(values), bool)
        found[window:] = values[:-window] - values[window:] > size
        return found

    return sounds


def _page(values: Array, slack: float = 0.5, level: float = 5.0, window: int = 20) -> Array:
    """Return the one-sided CUSUM [n] of standardised values, the first `window` as baseline (slack 0.5, level 5)."""
    base = values[:window][np.isfinite(values[:window])]
    if len(base) < 3 or base.std() == 0:
        return np.zeros(len(values), bool)
    total, found = 0.0, np.zeros(len(values), bool)
    for i, value in enumerate(values):
        if i >= window and np.isfinite(value):
            total = max(0.0, total + (value - base.mean()) / base.std() - slack)
        found[i] = total > level
    return found


def _ours(known: Known) -> Array:
    """Fire for a harmful mismatch, contradictory rewards, or a learning rate or gradient norm out of range."""
    return (
        own.gap_bends(known["mean_abs_d"])
        | own.rewards_contradict(known["unequal_rewards"])
        | own.rate_jumps(known["learning_rate"])
        | own.norm_jumps(known["grad_norm"])
    )


RULES = (
    Rule(name="k3 > 1e-3", source="NeMo-RL", sounds=_above("k3", 1e-3)),
    Rule(name="k3 > 2e-2", source="IcePop's middle band", sounds=_above("k3", 2e-2)),
    Rule(name="k3 > 0.05", source="IcePop (2510.18855): dead", sounds=_above("k3", 0.05)),
    Rule(name="|mean d| > 0.1", source="verl's rollout_corr/kl", sounds=_size_above("mean_d", 0.1)),
    Rule(name="mean exp|d| > 1.05", source="NeMo-RL token_mult_prob_error", sounds=_above("mult_prob_error", 1.05)),
    Rule(name="mean |d| > 0.01", source="practitioners' guides", sounds=_above("mean_abs_d", 1e-2)),
    Rule(name="max |d| > 1", source="practitioners' guides", sounds=_above("max_abs_d", 1.0)),
    Rule(name="ESS < 0.3", source="verl's documentation", sounds=_below("ess", 0.3)),
    Rule(name="mean exp(d) outside 0.5 to 2", source="verl's documentation", sounds=_outside("ratio_mean", 0.5, 2.0)),
    Rule(name="std exp(d) > 1", source="verl's documentation", sounds=_above("ratio_std", 1.0)),
    Rule(name="chi2 of tokens > 1", source="verl's documentation", sounds=_above("chi2_token", 1.0)),
    Rule(name="bad updates > 0.5 %", source="DPPO", sounds=_above("bad_updates", 0.005)),
    Rule(name="k3 over 3 sd of the last 100", source="rlwatch", sounds=lambda k: _score(k["k3"], 100, frozen=False) > 3),
    Rule(name="grad norm over 3 sd of the first 20, and 1.5x", source="rlwatch", sounds=_over_frozen),
    Rule(name="grad norm |z| > 3 for 3 steps", source="practitioners' guides",
         sounds=lambda k: sustained(np.abs(_score(k["grad_norm"], 20, frozen=False)) > 3, 3)),
    Rule(name="grad norm drops to 0.29", source="Miles", sounds=_norm_drop),
    Rule(name="length surge x2", source="arXiv 2602.01826", sounds=_surge),
    Rule(name="entropy < 0.2 nats", source="practitioners' guides", sounds=_below("entropy", 0.2)),
    Rule(name="entropy < 1 nat for 50 steps", source="rlwatch", sounds=lambda k: sustained(k["entropy"] < 1.0, 50)),
    Rule(name="H / H0 < 0.2", source="practitioners' guides",
         sounds=lambda k: k["entropy"] < 0.2 * np.nanmean(k["entropy"][:5])),
    Rule(name="reward drifts by 0.1 in 50 steps", source="rlwatch", sounds=_drift("reward", 0.1, 50)),
    Rule(name="reward variance x3", source="rlwatch",
         sounds=lambda k: k["reward_std"] ** 2 > 3 * np.nanmean(k["reward_std"][:20]) ** 2),
    Rule(name="CUSUM of ln k3 (0.5, 5)", source="Page 1954", sounds=lambda k: _page(logarithm(k["k3"]))),
    Rule(name="tim-trace", source="this project", sounds=_ours),
)  # fmt: skip
"""Each follows its own definition; if a source does not give a window, the function documents the choice."""
