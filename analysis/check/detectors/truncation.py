"""Detect probability mass missing in one pass: cut off by top-p, top-k or min-p, or assigned to vocabulary padding."""

from __future__ import annotations

import numpy as np

from .. import commands
from ..finding import Finding
from ..pair_data import PairData
from ..thresholds import (
    KEPT_VOCABULARY,
    MAX_CUT_NATS,
    MAX_MINOR_SHARE,
    MIN_LARGE_SHARE,
    MIN_LEANING,
    MIN_MASS_SCORE,
    MIN_ONE_SIDED,
    NUCLEUS_ALONE_SHARE,
)


def find_one_sided(data: PairData) -> list[Finding]:
    """Detect that nearly all of the larger differences have the same sign. The mean of exp(-|d|) over sampled tokens is
    then the probability mass that both passes share."""
    size = np.abs(data.d)
    if len(size) < 20 or not size.any():
        return []
    squares = size * size
    negative = float(squares[data.d < 0].sum() / squares.sum())
    minor = size[data.d > 0] if negative > 0.5 else size[data.d < 0]
    # Differences from rounding have both signs; differences larger than rounding must have only one.
    large = size > 2 * (float(np.quantile(minor, 0.95)) if len(minor) else 0.0)
    wrong = float(np.mean((data.d[large] > 0) == (negative > 0.5))) if large.any() else 1.0
    clear = wrong <= MAX_MINOR_SHARE and squares[large].sum() >= MIN_LARGE_SHARE * squares.sum()
    # Scaled logits change logprobs in the tail by a lot in one direction, and all others by a little in the opposite direction.
    lean = abs(float(data.d.mean())) / float(size.mean())
    if lean < (MIN_ONE_SIDED if clear else MIN_LEANING) or np.quantile(size, 0.999) > MAX_CUT_NATS:
        return []
    raised, lowered = ("b", "a") if negative > 0.5 else ("a", "b")
    mass = np.minimum(np.exp(data.d if negative > 0.5 else -data.d), 1.0)
    score = (1 - mass.mean()) / max(float(mass.std()) / np.sqrt(len(mass)), 1e-12)
    if score < (MIN_MASS_SCORE if clear else 2 * MIN_MASS_SCORE):
        return []
    of = _truncation if _is_cut(data, raised) else _padding
    return [of(data, raised, lowered, mass)]


def _is_cut(data: PairData, raised: str) -> bool:
    """Return True if tokens were cut off, False if padding rows were added to the vocabulary.

    The mean of 1 / p over sampled tokens estimates how many tokens can be sampled: the whole vocabulary, or only the
    kept tokens. If the distribution has a flat tail, every nucleus has the same mass; a token alone in its nucleus has
    logprob 0.
    """
    settings = data.sample.settings
    if np.any(settings["top_p"] < 1) or np.any(settings["top_k"] > 0) or np.any(settings["min_p"] > 0):
        return True
    sides = {"a": data.sample.a, "b": data.sample.b}
    cut_off = np.isneginf(sides[raised].logprobs) & np.isfinite(sides["b" if raised == "a" else "a"].logprobs)
    if np.any(cut_off & data.sample.mask):
        return True  # the other pass sampled a token that this pass cut off
    if raised == "a" or _is_neutral(data):
        return False
    if np.mean((data.b > -1e-6) & (data.a < -1e-3)) > NUCLEUS_ALONE_SHARE:
        return True
    vocabulary = int(data.sample.tokens.max()) + 1
    missing = -np.expm1(np.minimum(data.d, 0.0))
    constant = np.subtract(*np.quantile(missing, [0.9, 0.1])) < 0.02 * np.median(missing)
    return bool(constant or np.mean(np.exp(-data.b)) < KEPT_VOCABULARY * vocabulary)


def _is_neutral(data: PairData) -> bool:
    """Return True if the recorded sampling settings rule out truncation."""
    settings = data.sample.settings
    neutral = {"top_p": 1.0, "top_k": 0.0, "min_p": 0.0}
    return all(bool(np.all(settings[name] == value)) for name, value in neutral.items())


def _truncation(data: PairData, raised: str, lowered: str, mass: np.ndarray) -> Finding:
    return data.finding(
        "truncation",
        "kept_mass",
        mass < 1 - 1e-6,
        next=commands.replay(data, f"--top-p {max(mass.min(), 0.01):.2g}", "cut"),
        numbers={
            "side": data.names[raised],
            "other": data.names[lowered],
            "kept_mass": float(mass.mean()),
            "least_mass": float(mass.min()),
        },
    )


def _padding(data: PairData, raised: str, lowered: str, mass: np.ndarray) -> Finding:
    return data.finding(
        "padded_vocabulary",
        "lost_mass",
        mass < 1 - 1e-6,
        next=commands.sql(
            data,
            f"SELECT step, avg(1 - exp(-abs(d))) AS lost_mass FROM {{pair}} WHERE mask AND d {'<' if lowered == 'a' else '>'} 0 "
            "GROUP BY step ORDER BY step",
        ),
        numbers={"side": data.names[lowered], "other": data.names[raised], "lost_mass": float(1 - mass.mean())},
    )
