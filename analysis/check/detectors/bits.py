"""Detect logprobs that were rounded to a 16-bit format before recording."""

from __future__ import annotations

import numpy as np

from ..thresholds import MIN_ROUNDED_SHARE, MIN_ROUNDED_TOKENS


def value_precision(logprobs: np.ndarray) -> str | None:
    """Return the dtype that logprobs, [K], were rounded to: `bfloat16`, `float16` or `float32`; None if too few are
    informative."""
    telling = np.abs(logprobs[np.isfinite(logprobs) & (logprobs < -1e-3) & (logprobs > -60)]).astype(np.float32)
    if len(np.unique(telling)) < MIN_ROUNDED_TOKENS:
        return None
    bits = telling.view(np.uint32)
    for dtype, low in (("bfloat16", 0xFFFF), ("float16", 0x1FFF)):
        if np.mean((bits & low) == 0) >= MIN_ROUNDED_SHARE:
            return dtype
    return "float32"
