"""How well an explanation fits: the likelihood of the residuals it leaves, as a mixture of rounding and unexplained
errors.

Shapes: K kept tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lgamma, log, pi, sqrt

import numpy as np

from .pair_data import MIN_REST, PairData, once
from .rounding import FLOOR_NATS, allowed_noise, logit_error, value_rounding

FALSE_SHARE = 1e-3
"""Expected false discovery rate among the tokens reported as off (Benjamini and Hochberg, 1995)."""
DEGREES = 3.0
"""Degrees of freedom of the Student t distribution that models rounding errors: tails in healthy runs of small and
large models are no heavier.
"""
MAX_FLIP_NATS = 3.0
"""Largest logit error, nats, that is attributed to a different expert if the model is not known to be a mixture of
experts.
"""
MIN_OFF_TOKENS = 5
"""Minimum number of tokens off to report; with fewer, only those off by more than MAX_FLIP_NATS are reported."""
LEAST_SHARE = 6.0
"""The noise assumed for a run is at least 1 / LEAST_SHARE of what its dtypes allow: if nearly all tokens are
bit-identical, the measured noise is almost 0.
"""
MAX_SCORED_TOKENS = 20_000
"""Maximum number of tokens on which explanations are compared; whole rows are taken, spread evenly over the sample."""
_CONSTANT = lgamma((DEGREES + 1) / 2) - lgamma(DEGREES / 2) - 0.5 * log(DEGREES * pi)
_ROUNDS = 6


@dataclass(frozen=True, slots=True)
class Fit:
    """Rounding and unexplained errors fitted to residuals."""

    sigma: float
    """Scale of the rounding error of a logit, nats."""
    log_likelihood: float
    """Log likelihood of all residuals, nats."""


def fit(residual: np.ndarray, scale: np.ndarray, values: np.ndarray, most: float) -> Fit:
    """Fit a mixture of rounding (Student t with scale sigma * `scale`, but at least `values`) and unexplained errors
    (Laplace) to residuals, [K] nats; sigma is at most `most` nats.
    """
    size = np.abs(residual)
    if not len(size):
        return Fit(FLOOR_NATS, 0.0)
    noise = size / scale
    sigma = float(np.clip(1.3 * np.median(noise), FLOOR_NATS, most))
    width = max(float(np.mean(size)), sigma)
    unexplained = 0.05
    for _ in range(_ROUNDS):
        spread = np.hypot(sigma * scale, values)
        weighted = (size / spread) ** 2
        inside = np.log1p(-unexplained) + _CONSTANT - np.log(spread) - (DEGREES + 1) / 2 * np.log1p(weighted / DEGREES)
        outside = np.log(unexplained) - np.log(2 * width) - size / width
        total = np.logaddexp(inside, outside)
        off = np.exp(outside - total)
        unexplained = float(np.clip(off.mean(), 1e-6, 0.999))
        width = max(float(np.sum(off * size) / max(off.sum(), 1e-9)), sigma, FLOOR_NATS)
        weight = (1 - off) * (DEGREES + 1) / (DEGREES + weighted)
        sigma = float(np.clip(sqrt(np.sum(weight * noise**2) / max(np.sum(1 - off), 1e-9)), FLOOR_NATS, most))
    return Fit(sigma, float(total.sum()))


@once
def scored(data: PairData) -> np.ndarray:
    """Return [K] bool: the tokens on which explanations are compared."""
    rows = np.unique(data.seq)
    every = -(-data.num_kept // MAX_SCORED_TOKENS)
    return np.isin(data.seq, rows[:: max(every, 1)]) if every > 1 else np.ones(data.num_kept, bool)


@once
def unexplained(data: PairData) -> Fit:
    """Return the fit to d itself, without any explanation."""
    return _fit(data, data.d)


def gain(data: PairData, residual: np.ndarray, cost: float) -> float:
    """Return the log likelihood of the residuals, [K], minus that of d and the cost of describing the explanation,
    nats.
    """
    return _fit(data, residual).log_likelihood - unexplained(data).log_likelihood - cost


def _fit(data: PairData, residual: np.ndarray) -> Fit:
    chosen = scored(data)
    return fit(residual[chosen], data.scale[chosen], value_rounding(data)[chosen], allowed_noise(data))


@once
def levels(data: PairData) -> np.ndarray:
    """Return the logarithm [K] of the logit error that would explain d, after adding a quarter of its median."""
    noise = logit_error(data)
    return np.asarray(np.log(noise + np.median(noise) / 4)) if len(noise) else noise


def apart(data: PairData, *parts: np.ndarray) -> float:
    """Return the gain in log likelihood, nats, of fitting rounding and unexplained errors separately to each part of
    the tokens, [K] bool.
    """
    chosen = scored(data)
    scale, values, most = data.scale, value_rounding(data), allowed_noise(data)
    within = [part & chosen for part in parts]
    own = [fit(data.d[part], scale[part], values[part], most).log_likelihood for part in within if part.any()]
    return sum(own) - unexplained(data).log_likelihood if len(own) > 1 else 0.0


def explained(data: PairData, inside: np.ndarray) -> float:
    """Return the share of the variance of `level` explained by splitting the tokens into inside, [K] bool, and
    outside.
    """
    num = int(inside.sum())
    if not 0 < num < len(inside):
        return 0.0
    level = levels(data) - levels(data).mean()
    part = float(level[inside].sum())
    return part**2 * (1 / num + 1 / (len(inside) - num)) / max(float(level @ level), 1e-30)


@once
def nobodys(data: PairData) -> np.ndarray:
    """Return [K] bool: the tokens whose d exceeds rounding, with an expected share of at most FALSE_SHARE false
    positives.

    Rounding errors of a logit follow a t distribution with six degrees of freedom, with the scale found in the run, but
    at least a sixth of what the dtypes allow.
    """
    allowed = allowed_noise(data)
    uncertain = data.rest > MIN_REST
    usual = 1.4 * float(np.median(np.abs(data.d[uncertain]) / data.scale[uncertain])) if uncertain.any() else 0.0
    sigma = float(np.clip(max(unexplained(data).sigma, usual), allowed / LEAST_SHARE, allowed))
    # Nearly certain tokens have a different level of noise from the others, so they are compared with what the dtypes
    # allow.
    spread = np.where(data.rest > MIN_REST, sigma, max(sigma, allowed / 4)) * data.scale
    chance = _beyond(np.abs(data.d) / np.hypot(spread, 2 * value_rounding(data)))
    order = np.sort(chance)
    passed = np.flatnonzero(order <= FALSE_SHARE * np.arange(1, len(order) + 1) / len(order))
    off = chance <= order[passed[-1]] if len(passed) else np.zeros(len(chance), bool)
    # A chance flip of one router in a mixture of experts changes a token by less than this.
    return off if off.sum() >= MIN_OFF_TOKENS else off & (np.abs(data.d) > MAX_FLIP_NATS)


def _beyond(size: np.ndarray) -> np.ndarray:
    """Return the probability that |t| with six degrees of freedom exceeds `size`."""
    t = size / np.sqrt(6 + size**2)
    near = 1 - t * (1 + (1 - t**2) / 2 + 3 / 8 * (1 - t**2) ** 2)
    return np.asarray(np.where(size > 50, 270 / np.maximum(size, 1) ** 6, np.maximum(near, 0.0)))
