"""Probability that one side lacks: cut off by top-p, top-k or min-p, or given to the padding of the vocabulary."""

from __future__ import annotations

import numpy as np

from .. import commands
from ..evidence import Evidence
from ..finding import Finding
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


def find_one_sided(evidence: Evidence) -> list[Finding]:
    """The larger gaps have one sign: the mean of exp(-|d|) over sampled tokens is then the mass that both sides share."""
    size = np.abs(evidence.d)
    if len(size) < 20 or not size.any():
        return []
    squares = size * size
    negative = float(squares[evidence.d < 0].sum() / squares.sum())
    minor = size[evidence.d > 0] if negative > 0.5 else size[evidence.d < 0]
    # Rounding is on the minor side too; gaps beyond it must all have the other sign.
    large = size > 2 * (float(np.quantile(minor, 0.95)) if len(minor) else 0.0)
    wrong = float(np.mean((evidence.d[large] > 0) == (negative > 0.5))) if large.any() else 1.0
    clear = wrong <= MAX_MINOR_SHARE and squares[large].sum() >= MIN_LARGE_SHARE * squares.sum()
    # Another scale of the logits moves the tail far one way, and everything else a little the other.
    lean = abs(float(evidence.d.mean())) / float(size.mean())
    if lean < (MIN_ONE_SIDED if clear else MIN_LEANING) or np.quantile(size, 0.999) > MAX_CUT_NATS:
        return []
    raised, lowered = ("b", "a") if negative > 0.5 else ("a", "b")
    mass = np.minimum(np.exp(evidence.d if negative > 0.5 else -evidence.d), 1.0)
    score = (1 - mass.mean()) / max(float(mass.std()) / np.sqrt(len(mass)), 1e-12)
    if score < (MIN_MASS_SCORE if clear else 2 * MIN_MASS_SCORE):
        return []
    of = _truncation if _is_cut(evidence, raised) else _padding
    return [of(evidence, raised, lowered, mass)]


def _is_cut(evidence: Evidence, raised: str) -> bool:
    """Whether tokens were cut off, rather than rows added to the vocabulary.

    Over samples the mean of 1 / p is the number of tokens that can be sampled: the whole vocabulary, or those that were
    kept. A nucleus that lies in a flat tail has always the same mass; one token alone in it has logprob 0.
    """
    settings = evidence.sample.settings
    if np.any(settings["top_p"] < 1) or np.any(settings["top_k"] > 0) or np.any(settings["min_p"] > 0):
        return True
    if raised == "a" or _is_neutral(evidence):
        return False
    if np.mean((evidence.b > -1e-6) & (evidence.a < -1e-3)) > NUCLEUS_ALONE_SHARE:
        return True
    vocabulary = int(evidence.sample.tokens.max()) + 1
    missing = -np.expm1(np.minimum(evidence.d, 0.0))
    constant = np.subtract(*np.quantile(missing, [0.9, 0.1])) < 0.02 * np.median(missing)
    return bool(constant or np.mean(np.exp(-evidence.b)) < KEPT_VOCABULARY * vocabulary)


def _is_neutral(evidence: Evidence) -> bool:
    """Whether the recorded settings say that nothing was cut off."""
    settings = evidence.sample.settings
    neutral = {"top_p": 1.0, "top_k": 0.0, "min_p": 0.0}
    return all(bool(np.all(settings[name] == value)) for name, value in neutral.items())


def _truncation(evidence: Evidence, raised: str, lowered: str, mass: np.ndarray) -> Finding:
    name, other = getattr(evidence.sample, raised).name, getattr(evidence.sample, lowered).name
    return Finding(
        code="truncation",
        evidence=f"{name} is never below {other}: it was renormalised over the tokens that sampling kept, {mass.mean():.4g} of "
        f"{other}'s mass on average and {mass.min():.3g} at least",
        effect=evidence.rms(),
        share=float(np.mean(mass < 1 - 1e-6)),
        next=commands.replay(evidence, f"--top-p {max(mass.min(), 0.01):.2g}", "cut"),
        numbers={"kept_mass": float(mass.mean()), "least_mass": float(mass.min()), "side": name},
    )


def _padding(evidence: Evidence, raised: str, lowered: str, mass: np.ndarray) -> Finding:
    name, other = getattr(evidence.sample, lowered).name, getattr(evidence.sample, raised).name
    return Finding(
        code="padded_vocabulary",
        evidence=f"{name} is never above {other}: {1 - mass.mean():.3g} of its probability goes to something that no token "
        "stands for, as rows of the head beyond the tokenizer's length do: mask these",
        effect=evidence.rms(),
        share=float(np.mean(mass < 1 - 1e-6)),
        next=commands.sql(
            evidence,
            f"SELECT step, avg(1 - exp(-abs(d))) AS lost_mass FROM {{pair}} WHERE mask AND d {'<' if lowered == 'a' else '>'} 0 "
            "GROUP BY step ORDER BY step",
        ),
        numbers={"lost_mass": float(1 - mass.mean()), "side": name},
    )
