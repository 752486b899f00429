"""How much of a gap belongs to the tokens themselves."""

from __future__ import annotations

import numpy as np

from ..evidence import Evidence, once
from ..thresholds import MIN_EFFECT_TOKENS
from .variance import between


@once
def token_effect(evidence: Evidence) -> tuple[float, float]:
    """Adjusted share of the variance of d / (1 - p) that token ids explain, and its distance from 0 in standard deviations
    of pure noise; 0 where too few gaps tell. The largest hundredth is clipped.
    """
    there = np.isfinite(evidence.noise)
    signed = (evidence.d / np.maximum(evidence.rest, 1e-9))[there]
    tokens = evidence.sample.tokens[evidence.keep][there]
    # Sequences of a group begin alike, and what comes again is no new evidence.
    once = np.unique(np.stack([tokens, signed]), axis=1)
    tokens, signed = once[0].astype(np.int64), once[1]
    num, groups = len(signed), len(np.unique(tokens))
    if num < max(MIN_EFFECT_TOKENS, groups + 10):
        return 0.0, 0.0
    cut = float(np.quantile(np.abs(signed), 0.99))
    return between(np.clip(signed, -cut, cut), tokens)
