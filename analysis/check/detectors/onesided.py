"""Probability that one side lacks: cut off by top-p, top-k or min-p, or given to the padding of the vocabulary."""

from __future__ import annotations

import numpy as np

from ..evidence import Evidence
from ..finding import Finding
from ..thresholds import LARGE_SHARE, MAX_CUT_NATS, MAX_MINOR_SHARE, MIN_MASS_SCORE, NUCLEUS_ALONE_SHARE


def find_one_sided(evidence: Evidence) -> list[Finding]:
    """The larger gaps have one sign: the mean of exp(-|d|) over sampled tokens is then the mass that both sides share."""
    size = np.abs(evidence.d)
    if len(size) < 20 or not size.any():
        return []
    large = size >= max(float(np.quantile(size, 1 - LARGE_SHARE)), 1e-12)
    negative = float(np.mean(evidence.d[large] < 0))
    if min(negative, 1 - negative) > MAX_MINOR_SHARE or np.quantile(size, 0.999) > MAX_CUT_NATS:
        return []
    raised, lowered = ("b", "a") if negative > 0.5 else ("a", "b")
    mass = np.exp(np.minimum(evidence.d if negative > 0.5 else -evidence.d, 0.0))
    score = (1 - mass.mean()) / max(float(mass.std()) / np.sqrt(len(mass)), 1e-12)
    if score < MIN_MASS_SCORE:
        return []
    of = _truncation if _is_cut(evidence, raised) else _padding
    return [of(evidence, raised, lowered, mass)]


def _is_cut(evidence: Evidence, raised: str) -> bool:
    """Whether tokens were cut off, rather than rows added to the vocabulary."""
    settings = evidence.sample.settings
    if any(np.any(settings[name] < 1) for name in ("top_p",)) or any(
        np.any(settings[name] > 0) for name in ("top_k", "min_p")
    ):
        return True
    high = getattr(evidence, raised)
    other = evidence.a if raised == "b" else evidence.b
    alone = (high > -1e-6) & (other < -1e-3)
    return bool(alone.mean() > NUCLEUS_ALONE_SHARE)


def _truncation(evidence: Evidence, raised: str, lowered: str, mass: np.ndarray) -> Finding:
    name, other = getattr(evidence.sample, raised).name, getattr(evidence.sample, lowered).name
    return Finding(
        code="truncation",
        evidence=f"{name} is never below {other}: it was renormalised over the tokens that sampling kept, {mass.mean():.4g} of "
        f"{other}'s mass on average and {mass.min():.3g} at least",
        effect=evidence.rms(),
        share=float(np.mean(mass < 1 - 1e-6)),
        next=f"tim-trace replay {evidence.trace} --steps {int(evidence.sample.steps[0])} --top-p {max(mass.min(), 0.01):.2g}",
        numbers={"kept_mass": float(mass.mean()), "least_mass": float(mass.min()), "side": name},
    )


def _padding(evidence: Evidence, raised: str, lowered: str, mass: np.ndarray) -> Finding:
    name, other = getattr(evidence.sample, lowered).name, getattr(evidence.sample, raised).name
    return Finding(
        code="padded_vocabulary",
        evidence=f"{name} is never above {other}: {1 - mass.mean():.3g} of its probability goes to something that no token "
        "stands for, as rows of the head beyond the vocabulary do",
        effect=evidence.rms(),
        share=float(np.mean(mass < 1 - 1e-6)),
        next="mask the rows of the head beyond the tokenizer's length, and record again",
        numbers={"lost_mass": float(1 - mass.mean()), "side": name},
    )
