"""A temperature that one side divides its logits by and the other does not."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .. import commands
from ..evidence import Evidence, declared
from ..finding import Finding
from ..thresholds import (
    MAX_TEMPERATURE,
    MIN_TEMPERATURE_R2,
    MIN_TEMPERATURE_SCORE,
    MIN_TEMPERATURE_SHIFT,
    MIN_TEMPERATURE_TOKENS,
)


@dataclass(frozen=True, slots=True)
class Fit:
    """Logits of b = scale * logits of a, fitted."""

    scale: float
    """1 / temperature of b, seen from a."""
    r2: float
    """Share of the sum of d squared that it explains."""
    score: float
    """How many standard errors the scale lies off 1."""


def find_temperature(evidence: Evidence) -> list[Finding]:
    """d follows the logits themselves: logprob + entropy where entropies were recorded, the log-odds elsewhere."""
    fit = fit_scale(evidence)
    if fit is None or not is_temperature(fit):
        return []
    a, b = evidence.sample.a.name, evidence.sample.b.name
    said = _declared(evidence)
    temperature = 1 / fit.scale
    return [
        Finding(
            code="temperature",
            evidence=f"{b}'s logits are {a}'s divided by {temperature:.3g} (fitted; {fit.r2:.0%} of the gap follows it)"
            + (f"; recorded: {said}" if said else ""),
            effect=evidence.rms(),
            share=1.0,
            weight=fit.r2,
            next=commands.replay(evidence, f"--temperature {_to_try(evidence, temperature):.3g}", "temperature"),
            numbers={"temperature": temperature, "r2": fit.r2, "standard_errors": fit.score},
        )
    ]


def is_temperature(fit: Fit) -> bool:
    """Whether a fit is far enough from 1, sure enough, and explains enough."""
    return (
        abs(np.log(fit.scale)) >= MIN_TEMPERATURE_SHIFT
        and fit.score >= MIN_TEMPERATURE_SCORE
        and fit.r2 >= MIN_TEMPERATURE_R2
    )


def fit_scale(evidence: Evidence) -> Fit | None:
    """Fit one factor between both sides' logits; None where too few tokens can tell."""
    fits = [_by_entropy(evidence, side) for side in ("a", "b")] + [_by_odds(evidence)]
    known = [fit for fit in fits if fit is not None]
    return max(known, key=lambda fit: fit.r2) if known else None


def _by_entropy(evidence: Evidence, side: str) -> Fit | None:
    """Scaling logits by s moves a logprob by (s - 1)(logprob + entropy) - (s - 1)^2 varentropy / 2 + ..."""
    recorded = getattr(evidence.sample, side).entropy
    if recorded is None:
        return None
    logprobs = getattr(evidence, side)
    u = logprobs + recorded[evidence.keep]
    there = np.isfinite(u) & (np.abs(u) < 20)
    if there.sum() < MIN_TEMPERATURE_TOKENS:
        return None
    d = evidence.d[there] * (-1 if side == "a" else 1)
    x = np.stack([u[there], u[there] ** 2, np.ones(there.sum())], axis=1)
    keep = np.abs(d) <= np.quantile(np.abs(d), 0.99) + 1e-12
    x, d = x[keep], d[keep]
    solution, *_ = np.linalg.lstsq(x, d, rcond=None)
    left = d - x @ solution
    slope = float(solution[0])
    error = float(np.sqrt(left @ left / len(d) * np.linalg.inv(x.T @ x + 1e-12 * np.eye(3))[0, 0]))
    scale = 1 + slope
    if side == "b" and scale > 0:  # a = scale * b
        scale = 1 / scale
    if not 1 / MAX_TEMPERATURE < scale < MAX_TEMPERATURE:
        return None
    return Fit(scale, 1 - float(left @ left) / max(float(d @ d), 1e-30), abs(slope) / max(error, 1e-12))


def _by_odds(evidence: Evidence) -> Fit | None:
    """The slope of b's log-odds on a's: with one alternative it is the factor, with k of them the line is raised by
    (s - 1) log k."""
    odds_a, odds_b = (_log_odds(x) for x in (evidence.a, evidence.b))
    there = (
        np.isfinite(odds_a) & np.isfinite(odds_b) & (evidence.rest > 1e-5) & (np.minimum(evidence.a, evidence.b) > -15)
    )
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
    # Noise on one axis flattens a slope: the truth lies between both regressions.
    scale = low if low > 1 else high if high < 1 else 1.0
    left = yy - xy * xy / xx
    error = np.sqrt(max(left, 0.0) / max(xx, 1e-30) / len(x))
    off = off - off.mean()
    explained = 1 - float(np.sum((y - scale * x) ** 2)) / max(float(off @ off), 1e-30)
    return Fit(float(scale), explained, float(abs(scale - 1) / max(error, 1e-12)))


def _log_odds(logprobs: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(logprobs - np.log(-np.expm1(np.minimum(logprobs, 0.0))))


def _declared(evidence: Evidence) -> str:
    """The temperatures that the trace names."""
    named = {
        f"{evidence.sample.a.name}'s contract": declared(evidence.contract("a"), "temperature"),
        f"{evidence.sample.b.name}'s contract": declared(evidence.contract("b"), "sampling", "temperature"),
    }
    settings = evidence.sample.settings["temperature"]
    if np.isfinite(settings).any():
        named["sampling"] = float(np.nanmedian(settings))
    parts = [f"{name} {value:g}" for name, value in named.items() if isinstance(value, (int, float))]
    mode = declared(evidence.contract("b"), "logprobs_mode")
    return ", ".join(parts + ([f"logprobs_mode {mode}"] if mode else []))


def _to_try(evidence: Evidence, fitted: float) -> float:
    """The recorded temperature, where the fit is near it; else the fit."""
    settings = evidence.sample.settings["temperature"]
    recorded = float(np.nanmedian(settings)) if np.isfinite(settings).any() else fitted
    return recorded if abs(np.log(recorded / fitted)) < 0.3 else fitted
