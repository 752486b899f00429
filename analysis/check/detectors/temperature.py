"""Detect a temperature applied to the logits in one pass only."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from ...advice import Advice
from .. import commands
from ..finding import Finding
from ..pair_data import PairData, declared
from ..thresholds import (
    MAX_TEMPERATURE,
    MIN_TEMPERATURE_R2,
    MIN_TEMPERATURE_SCORE,
    MIN_TEMPERATURE_SHIFT,
    MIN_TEMPERATURE_TOKENS,
)

_MODEL_ERROR = 0.05
"""Error of a fitted log T, relative to log T. The fits assume that log-odds scale linearly, which is exact for two
possible tokens and approximate for more."""


@dataclass(frozen=True, slots=True)
class ScaleFit:
    """Fit of logits_b = scale * logits_a."""

    scale: float
    """1 / temperature of b relative to a."""
    r2: float
    """Share of the sum of d^2 explained by the scale."""
    score: float
    """Distance between the scale and 1, in standard errors."""
    lowest: float = 0.0
    highest: float = float("inf")
    """`lowest` to `highest` is the range of the scale over all fits, each widened by two standard errors."""


def find_temperature(data: PairData) -> list[Finding]:
    """Detect that one pass's logits are the other's times a factor. The factor is fitted to the log-odds and, if
    entropies are recorded, to logprob + entropy."""
    fit = fit_scale(data)
    if fit is None or not is_temperature(fit):
        return []
    temperature = 1 / fit.scale
    return [
        data.finding(
            "temperature",
            "scaled_logits",
            weight=fit.r2,
            next=_confirming(data, temperature),
            numbers={
                "temperature": temperature,
                "least": 1 / fit.highest,
                "largest": 1 / fit.lowest,
                "r2": fit.r2,
                "standard_errors": fit.score,
                **data.names,
                **_declared(data),
            },
        )
    ]


def is_temperature(fit: ScaleFit) -> bool:
    """Return True if the fitted scale is far from 1, significantly so, and explains enough of d."""
    return (
        abs(np.log(fit.scale)) >= MIN_TEMPERATURE_SHIFT
        and fit.score >= MIN_TEMPERATURE_SCORE
        and fit.r2 >= MIN_TEMPERATURE_R2
    )


def fit_scale(data: PairData) -> ScaleFit | None:
    """Fit the factor between the logits in pass b and those in pass a; None if there are too few informative tokens."""
    fits = [_by_entropy(data, side) for side in ("a", "b")] + [_by_odds(data)]
    known = [fit for fit in fits if fit is not None]
    if not known:
        return None
    # Each fit is only a first-order approximation, so the spread between fits and the unexplained part of d count as error.
    telling = [fit for fit in known if is_temperature(fit)] or known
    best = max(known, key=lambda fit: fit.r2)
    wider = float(np.exp(abs(np.log(best.scale)) * max((1 - best.r2) / 2, _MODEL_ERROR)))
    lowest, highest = min(fit.lowest for fit in telling), max(fit.highest for fit in telling)
    return replace(best, lowest=max(lowest, 1 / MAX_TEMPERATURE) / wider, highest=highest * wider)


def _by_entropy(data: PairData, side: str) -> ScaleFit | None:
    """Fit the scale from the entropy. Scaling logits by s changes a logprob by
    (s - 1)(logprob + entropy) - (s - 1)^2 varentropy / 2 + ..."""
    recorded = getattr(data.sample, side).entropy
    if recorded is None:
        return None
    logprobs = getattr(data, side)
    u = logprobs + recorded[data.keep]
    there = np.isfinite(u) & (np.abs(u) < 20)
    if there.sum() < MIN_TEMPERATURE_TOKENS:
        return None
    d = data.d[there] * (-1 if side == "a" else 1)
    x = np.stack([u[there], u[there] ** 2, np.ones(there.sum())], axis=1)
    keep = np.abs(d) <= np.quantile(np.abs(d), 0.99) + 1e-12
    x, d = x[keep], d[keep]
    solution, *_ = np.linalg.lstsq(x, d, rcond=None)
    left = d - x @ solution
    slope = float(solution[0])
    slope_error = float(np.sqrt(left @ left / len(d) * np.linalg.inv(x.T @ x + 1e-12 * np.eye(3))[0, 0]))
    # The derivative of log p with respect to the scale changes along the way, so 1 + slope and exp(slope) bound the scale.
    scales = np.array([1 + slope - 2 * slope_error, math.exp(min(slope + 2 * slope_error, 50.0)), 1 + slope])
    if scales.min() <= 0:
        return None
    if side == "b":  # a = scale * b
        scales = 1 / scales
    scale = float(scales[2])
    if not 1 / MAX_TEMPERATURE < scale < MAX_TEMPERATURE:
        return None
    score = abs(slope) / max(slope_error, 1e-12)
    return ScaleFit(
        scale, 1 - float(left @ left) / max(float(d @ d), 1e-30), score, float(scales.min()), float(scales.max())
    )


def _by_odds(data: PairData) -> ScaleFit | None:
    """Fit the scale as the slope of the log-odds in pass b against those in pass a. With two possible tokens, the slope
    is the scale s; with k equally likely alternatives, the line is shifted by (s - 1) log k."""
    odds_a, odds_b = (_log_odds(x) for x in (data.a, data.b))
    there = np.isfinite(odds_a) & np.isfinite(odds_b) & (data.rest > 1e-5) & (np.minimum(data.a, data.b) > -15)
    if there.sum() < MIN_TEMPERATURE_TOKENS:
        return None
    x, y = odds_a[there], odds_b[there]
    off = y - x
    keep = np.abs(off - np.median(off)) <= np.quantile(np.abs(off - np.median(off)), 0.98) + 1e-12
    x, y, off = x[keep] - x[keep].mean(), y[keep] - y[keep].mean(), off[keep]
    xx, yy, xy = float(x @ x), float(y @ y), float(x @ y)
    if xy <= 0 or xx <= 0:
        return None
    low, high = sorted((xy / xx, yy / xy))
    # Noise on one axis flattens the slope, so the true slope is between the regressions of b on a and of a on b.
    scale = low if low > 1 else high if high < 1 else 1.0
    left = yy - xy * xy / xx
    error = np.sqrt(max(left, 0.0) / max(xx, 1e-30) / len(x))
    off = off - off.mean()
    explained = 1 - float(np.sum((y - scale * x) ** 2)) / max(float(off @ off), 1e-30)
    score = float(abs(scale - 1) / max(error, 1e-12))
    return ScaleFit(float(scale), explained, score, float(low - 2 * error), float(high + 2 * error))


def _log_odds(logprobs: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(logprobs - np.log(-np.expm1(np.minimum(logprobs, 0.0))))


def _declared(data: PairData) -> dict[str, float | str]:
    """Return the recorded temperatures, under the keys `recorded_a`, `recorded_b` and `recorded_sampling`, and
    `logprobs_mode`."""
    settings = data.sample.settings["temperature"]
    named = {
        "recorded_a": declared(data.contract("a"), "temperature"),
        "recorded_b": declared(data.contract("b"), "sampling", "temperature"),
        "recorded_sampling": float(np.nanmedian(settings)) if np.isfinite(settings).any() else None,
    }
    found: dict[str, float | str] = {name: value for name, value in named.items() if isinstance(value, (int, float))}
    mode = declared(data.contract("b"), "logprobs_mode")
    return found | ({"logprobs_mode": str(mode)} if mode else {})


def _confirming(data: PairData, temperature: float) -> Advice:
    """Return a command that replays at the temperature; if the trace has no weights, a query for the scale of the
    log-odds per step."""
    if data.has_weights:
        return commands.replay(data, f"--temperature {_to_try(data, temperature):.3g}", "temperature")
    odds = "ln(exp({0}) / (1 - exp({0})))"
    return commands.sql(
        data,
        f"SELECT step, regr_slope({odds.format('logprob_a')}, {odds.format('logprob_b')}) AS temperature_b "
        "FROM {pair} WHERE mask AND logprob_a < -0.001 AND logprob_b < -0.001 GROUP BY step ORDER BY step",
    )


def _to_try(data: PairData, fitted: float) -> float:
    """Return the recorded temperature if the fitted one is near it, else the fitted one."""
    settings = data.sample.settings["temperature"]
    recorded = float(np.nanmedian(settings)) if np.isfinite(settings).any() else fitted
    return recorded if abs(np.log(recorded / fitted)) < 0.3 else fitted
