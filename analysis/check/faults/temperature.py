"""A temperature applied to the logits in one pass only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...advice import Advice
from .. import commands
from ..finding import Fault
from ..likelihood import Hypothesis, predicting
from ..pair_data import PairData, declared
from ..rounding import allowed_noise, context_pairs, value_rounding

MIN_R2 = 0.6
"""Minimum share of the mismatch that one factor on the logits must explain, whichever side is taken as the reference.
Other faults that sharpen a distribution leave far more scatter, and faults that make tokens unlikely affect only one
side.
"""
MIN_SHIFT = 0.004
"""Minimum |log T| for a temperature T to be reported: rounding to bfloat16 changes the scale of logits by less."""
MAX_TEMPERATURE = 20.0
"""Largest fitted value accepted as a temperature."""
_MIN_TOKENS = 30
_MODEL_ERROR = 0.05
"""Error of a fitted log T, relative to log T. The fits assume that log-odds scale linearly, which is exact for two
possible tokens and approximate for more."""


def _recorded(numbers: Mapping[str, Any]) -> dict[str, str]:
    names = {"a": f"{numbers['a']}'s contract", "b": f"{numbers['b']}'s contract", "sampling": "sampling"}
    parts = [f"{name} {numbers[f'recorded_{key}']:g}" for key, name in names.items() if f"recorded_{key}" in numbers]
    if "logprobs_mode" in numbers:
        parts.append(f"logprobs_mode {numbers['logprobs_mode']}")
    return {"recorded_text": f"; recorded: {', '.join(parts)}" if parts else ""}


_CHANGING = (
    "{{b}}'s logits are {{a}}'s divided by a temperature that changes along {along}: {{temperatures}} in the four quarters "
    "{quarters} (fitted), which accounts for {{r2:.0%}} of the mismatch{{recorded_text}}"
)

TEMPERATURE = Fault(
    code="temperature",
    title="temperature on one side only",
    broken="recording",
    evidence={
        "scaled_logits": "{b}'s logits are {a}'s divided by {temperature:.3g} (fitted, {least:.3g} to {largest:.3g}), which "
        "accounts for {r2:.0%} of the mismatch{recorded_text}",
        "along_response": _CHANGING.format(along="the response", quarters="by position"),
        "along_steps": _CHANGING.format(along="the steps", quarters="of the steps"),
    },
    words={"scaled_logits": _recorded, "along_response": _recorded, "along_steps": _recorded},
    causes={"scale": "one side's logits are scaled: a temperature, or the scale of the head or its norm"},
)


@dataclass(frozen=True, slots=True)
class ScaleFit:
    """Fit of logits_b = scale * logits_a."""

    scale: float
    """1 / temperature of b relative to a."""
    r2: float
    """Share of the sum of d^2 explained by the scale; the smaller of the two sides' values."""
    score: float
    """Distance between the scale and 1, in standard errors."""
    lowest: float
    highest: float
    """`lowest` to `highest` is the range of the scale fitted from either side, widened by two standard errors."""
    residual: np.ndarray
    """[K] part of d that the scale does not explain, nats; NaN where it predicts nothing."""


def find_temperature(data: PairData) -> list[Hypothesis]:
    """Detect that one pass's logits are the other's times a factor. The factor is fitted to logprob + entropy if
    entropies are recorded, and to the log-odds; tokens that share a context determine it exactly.
    """
    off = np.abs(data.d) > 4 * value_rounding(data)
    lower = float(np.mean(data.d[off] < 0)) if off.any() else 0.5
    if not 0.02 < lower < 0.98:
        return []  # a factor raises likely tokens and lowers unlikely ones, or the other way round
    exact = _by_pairs(data)
    found = [_scaled(data, fit, exact) for fit in _fits(data) if _agrees(data, fit, exact)]
    return (
        found
        or _changing(data, data.position, "along_response")
        or _changing(data, data.sample.steps[data.seq], "along_steps")
    )


def _fits(data: PairData) -> list[ScaleFit]:
    """Return the fitted scales that are far from 1, significantly so, and explain enough of d."""
    fits = [fit for fit in (_by_entropy(data), _by_odds(data)) if fit is not None]
    return [fit for fit in fits if abs(np.log(fit.scale)) >= MIN_SHIFT and fit.score >= 6 and fit.r2 >= MIN_R2]


def _scaled(data: PairData, fit: ScaleFit, exact: Slope | None) -> Hypothesis:
    used = fit if exact is None else exact
    middle, low, high = used.scale, used.lowest, used.highest
    # A fit over different contexts is exact only to first order in log T.
    error = 0.0 if exact else max((1 - fit.r2) / 2, _MODEL_ERROR, abs(np.log(middle)) / 2)
    wider = float(np.exp(abs(np.log(middle)) * error))
    temperature = 1 / middle
    finding = TEMPERATURE.finding(
        data, "scaled_logits", weight=fit.r2, next=_confirming(data, temperature),
        numbers={
            "temperature": temperature, "least": 1 / (high * wider), "largest": wider / max(low, 1 / MAX_TEMPERATURE),
            "r2": fit.r2, "standard_errors": fit.score, **data.names, **_declared(data), **_cause(data),
        },
    )  # fmt: skip
    hypothesis = predicting(data, finding, fit.residual, 8.0)
    # A recorded temperature is tested first.
    named = low / wider < 1 / _to_try(data, temperature) < high * wider
    is_recorded = named and abs(np.log(_to_try(data, temperature))) > 0.02 and _to_try(data, temperature) != temperature
    return replace(hypothesis, gain=float("inf")) if is_recorded else hypothesis


def _cause(data: PairData) -> dict[str, str]:
    """Return the cause `scale`, which is more general than a temperature, if every recorded temperature is 1; empty
    otherwise.
    """
    recorded = [value for name, value in _declared(data).items() if name != "logprobs_mode"]
    return {"cause": "scale"} if recorded and all(value == 1.0 for value in recorded) else {}


def _changing(data: PairData, along: np.ndarray, signal: str) -> list[Hypothesis]:
    """Detect a factor that rises or falls along a coordinate, [K]."""
    cuts = np.quantile(along, [0.25, 0.5, 0.75])
    parts = [np.searchsorted(cuts, along, side="left") == part for part in range(4)]
    fits = [max(_fits(data.within(part)), key=lambda fit: fit.r2, default=None) for part in parts if part.sum() >= 100]
    scales = [1.0 if fit is None else fit.scale for fit in fits]
    known = [fit for fit in fits if fit is not None and fit.r2 > 0.8]
    steps = np.diff(np.log(scales))
    is_monotonic = np.all(steps > -0.02) or np.all(steps < 0.02)
    if len(known) < 3 or not is_monotonic or abs(np.log(scales[-1] / scales[0])) < 0.1:
        return []
    residual = data.d.copy()
    for part, fit in zip(parts, fits, strict=True):
        if fit is not None:
            residual[part] = fit.residual
    r2 = float(np.mean([fit.r2 for fit in known]))
    finding = TEMPERATURE.finding(
        data, signal, weight=r2,
        next=commands.stats(data, "step") if signal == "along_steps" else commands.query(data, "by-position"),
        numbers={
            "temperatures": ", ".join(f"{1 / scale:.3g}" for scale in scales), "r2": r2, **data.names, **_declared(data),
        },
    )  # fmt: skip
    return [predicting(data, finding, residual, 8.0 * len(fits))]


@dataclass(frozen=True, slots=True)
class Slope:
    """logits_b / logits_a, fitted to differences between tokens of one context, in which the normaliser cancels."""

    scale: float
    lowest: float
    highest: float
    r2: float
    """Share of the squared differences between the passes that the scale explains."""
    left: float
    """Rms of the logit differences that the scale does not explain, nats."""


def _by_pairs(data: PairData) -> Slope | None:
    first, second = context_pairs(data)
    one, two = data.a[first] - data.a[second], data.b[first] - data.b[second]
    known = (np.abs(one) > 0.3) & (np.abs(one) < 15)
    if known.sum() < 12:
        return None
    one, two = one[known], two[known]
    ratio = two / one
    scale = float(np.median(ratio))
    left = two - scale * one
    error = 2 * 1.25 * float(np.median(np.abs(ratio - scale))) / 0.67 / np.sqrt(len(ratio)) + 1e-5 * abs(scale)
    r2 = 1 - float(left @ left) / max(float((two - one) @ (two - one)), 1e-30)
    return Slope(scale, scale - error, scale + error, r2, float(np.sqrt(np.mean(left**2))))


def _agrees(data: PairData, fit: ScaleFit, exact: Slope | None) -> bool:
    """Return False if tokens that share a context rule out the factor."""
    if exact is None:
        return True
    is_scale = exact.r2 > 0.95 or exact.left < allowed_noise(data)
    return is_scale and exact.scale > 0 and np.log(exact.scale) * np.log(fit.scale) > 0


def _by_entropy(data: PairData) -> ScaleFit | None:
    """Fit the scale from the entropy. Scaling logits by s changes a logprob by
    (s - 1)(logprob + entropy) - (s - 1)^2 varentropy / 2 + ..."""
    for side in "ab":
        recorded = getattr(data.sample, side).entropy
        if recorded is not None:
            break
    else:
        return None
    entropy = recorded[data.keep]
    own, other = (data.a, data.b) if side == "a" else (data.b, data.a)
    there = np.isfinite(entropy) & (np.abs(own + entropy) < 20)
    if there.sum() < _MIN_TOKENS:
        return None
    d = (other - own)[there]
    fits = [_regressed(d, (values + entropy)[there]) for values in (own, other)]
    # d = (s - 1) u on the side with the entropy, and d = (s - 1) / s u' on the other.
    slope, error = fits[0][0], fits[0][1]
    back = fits[1][0]
    scales = [1 + slope - 2 * error, 1 + slope, math.exp(min(slope + 2 * error, 50.0))]
    if back < 1:
        scales.append(1 / (1 - back))
    if min(scales) <= 0:
        return None
    low, scale, high = min(scales), scales[1], max(scales)
    if side == "b":  # a = scale * b
        low, scale, high = 1 / high, 1 / scale, 1 / low
    if not 1 / MAX_TEMPERATURE < scale < MAX_TEMPERATURE:
        return None
    worse = min(fits, key=lambda each: each[2])
    residual = np.full(data.num_kept, np.nan)
    residual[there] = worse[3]
    return ScaleFit(scale, worse[2], abs(slope) / max(error, 1e-12), low, high, residual)


def _regressed(d: np.ndarray, u: np.ndarray) -> tuple[float, float, float, np.ndarray]:
    """Regress d on u, u^2 and a constant, clipping the largest 1 %. Return the slope on u, its standard error, the
    share of the sum of d^2 explained, and the residual of the unclipped d.
    """
    keep = np.abs(d) <= np.quantile(np.abs(d), 0.99) + 1e-12
    x = np.stack([u, u**2, np.ones(len(u))], axis=1)
    solution, *_ = np.linalg.lstsq(x[keep], d[keep], rcond=None)
    left = d - x @ solution
    inside = left[keep]
    error = float(np.sqrt(inside @ inside / keep.sum() * np.linalg.inv(x[keep].T @ x[keep] + 1e-12 * np.eye(3))[0, 0]))
    return float(solution[0]), error, 1 - float(inside @ inside) / max(float(d[keep] @ d[keep]), 1e-30), left


def _by_odds(data: PairData) -> ScaleFit | None:
    """Fit the scale as the slope of the log-odds in pass b against those in pass a. With two possible tokens, the slope
    is the scale s; with k equally likely alternatives, the line is shifted by (s - 1) log k."""
    odds_a, odds_b = (_log_odds(x) for x in (data.a, data.b))
    there = np.isfinite(odds_a) & np.isfinite(odds_b) & (data.rest > 1e-5) & (np.minimum(data.a, data.b) > -15)
    if there.sum() < _MIN_TOKENS:
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
    error = np.sqrt(max(yy - xy * xy / xx, 0.0) / max(xx, 1e-30) / len(x))
    off = off - off.mean()
    left = [y - scale * x, (y / scale - x) * (1 if scale == 1.0 else (scale - 1) / (1 - 1 / scale))]
    explained = 1 - max(float(each @ each) for each in left) / max(float(off @ off), 1e-30)
    residual = np.full(data.num_kept, np.nan)
    at = np.flatnonzero(there)[keep]
    residual[at] = left[0] * data.rest[at]
    score = float(abs(scale - 1) / max(error, 1e-12))
    return ScaleFit(float(scale), explained, score, float(low - 2 * error), float(high + 2 * error), residual)


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
