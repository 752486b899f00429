"""The shape of a mismatch over every axis."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .profile import Profile

BEFORE, AFTER = "before", "after"
"""Ratio that the samples call for, and the one that the loss uses after its clip."""
POSITIVE, NEGATIVE = "positive", "negative"
"""Sign of the advantage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """Counts and profiles over some tokens; the edges of their bins are those of the Breakdowns."""

    density: np.ndarray
    """[Y, X] int64 tokens by d (Y) and by the probability that pass b gave the token (X); the first and the last bin of d
    hold what lies outside too."""
    position: Profile
    """Over the token's place in the response, from 0."""
    length: Profile
    """Over the length of the response, in tokens."""
    entropy: Profile | None
    """Over the entropy that pass b recorded, else pass a, else the pass current; tokens whose entropy is not finite are in no
    bin. None where none recorded any."""
    ratios: dict[tuple[str, str], np.ndarray] | None
    """("before" or "after", "positive" or "negative") -> [R] int64: terms of the loss by the logarithm of their ratio, for
    advantages of that sign; the first and the last bin hold what lies outside too. "before" is current / b, "after" is what
    the loss uses; see ratios.py. Without "after" where the loss is not known; None where there are no advantages."""
