"""How the size of a gap lies over tokens: with the probability, from token to token, and from sequence to sequence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..evidence import Evidence, once
from ..thresholds import TEXTURE_LAGS
from .variance import between


@dataclass(frozen=True, slots=True)
class Texture:
    """Of log |d| / (1 - p) less what is usual for the token and the step; 0 where too few tokens tell."""

    tilt: float
    """Correlation with the logprob: rounding of weights moves all logits alike, updates move those of probable tokens more."""
    persistence: float
    """Mean correlation with the tokens one, two and four places on: high where the gap changes inside of sequences."""
    sequence_score: float
    """Share of the variance that lies between sequences, in standard deviations of what chance gives."""


@once
def texture(evidence: Evidence) -> Texture:
    """Measure the texture of a gap over the kept tokens."""
    level = evidence.level_beyond_tokens
    there = np.isfinite(level)
    if there.sum() < 2 * max(TEXTURE_LAGS):
        return Texture(0.0, 0.0, 0.0)
    steps, step = np.unique(evidence.sample.steps[evidence.seq], return_inverse=True)
    num = len(steps)
    level = (
        level
        - (np.bincount(step[there], level[there], num) / np.maximum(np.bincount(step[there], minlength=num), 1))[step]
    )
    lags = []
    for lag in TEXTURE_LAGS:
        same = (evidence.seq[lag:] == evidence.seq[:-lag]) & there[lag:] & there[:-lag]
        lags.append(_correlation(level[lag:][same], level[:-lag][same]))
    return Texture(
        tilt=_correlation(level[there], np.maximum(evidence.a, evidence.b)[there]),
        persistence=float(np.mean(lags)),
        sequence_score=between(level[there], evidence.seq[there])[1],
    )


def _correlation(x: np.ndarray, y: np.ndarray) -> float:
    if len(x) < 2:
        return 0.0
    x, y = x - x.mean(), y - y.mean()
    scale = float(np.sqrt((x @ x) * (y @ y)))
    return float(x @ y) / scale if scale > 0 else 0.0
