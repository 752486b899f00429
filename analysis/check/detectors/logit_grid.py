"""The precision of logits, seen from logprobs: of two tokens in one context the logprobs differ as their logits do.

A logit that was rounded to bfloat16 is a multiple of 2^-9 from 1/4 on upwards, one of float16 a multiple of 2^-12; so are
differences of two of them, whatever the softmax was computed in.
"""

from __future__ import annotations

import numpy as np

from ..evidence import Evidence
from ..thresholds import GRID_TOLERANCE, MIN_GRID_PAIRS, MIN_GRID_SHARE
from .contexts import prefix_keys

GRIDS = {"bfloat16": 2.0**9, "float16": 2.0**12}
"""dtype -> steps of its grid in a nat."""


def logit_precision(evidence: Evidence) -> tuple[str | None, str | None]:
    """The dtype that the logits of each side were rounded to: `bfloat16`, `float16` or `float32`; None where no two
    tokens of one context tell."""
    first, second = _pairs(evidence)
    scale = evidence.sample.settings["temperature"]
    sampled_at = float(np.nanmedian(scale)) if np.isfinite(scale).any() else 1.0
    found = []
    for values in (evidence.a, evidence.b):
        difference = values[first] - values[second]
        found.append(_of(difference, {1.0, sampled_at}))
    return found[0], found[1]


def _of(difference: np.ndarray, temperatures: set[float]) -> str | None:
    # Differences of a few steps lie near a grid anyhow, and rounding of the logprob itself blurs large ones.
    difference = np.unique(difference[(np.abs(difference) > 0.02) & (np.abs(difference) < 30)])
    if len(difference) < MIN_GRID_PAIRS:
        return None
    for dtype, steps in GRIDS.items():
        for temperature in sorted(temperatures):
            scaled = difference * temperature * steps
            if np.mean(np.abs(scaled - np.round(scaled)) < GRID_TOLERANCE[dtype]) > MIN_GRID_SHARE:
                return dtype
    return "float32"


def _pairs(evidence: Evidence) -> tuple[np.ndarray, np.ndarray]:
    """Indices into the kept tokens: neighbours that stand in one context of one step and are different tokens."""
    keys = prefix_keys(evidence)[evidence.keep]
    steps = evidence.sample.steps[evidence.seq]
    tokens = evidence.sample.tokens[evidence.keep]
    order = np.lexsort((tokens, keys, steps))
    one, two = order[:-1], order[1:]
    pair = (keys[one] == keys[two]) & (steps[one] == steps[two]) & (tokens[one] != tokens[two])
    return one[pair], two[pair]
