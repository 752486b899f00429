"""From the points of suspects to their probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from .suspect import Suspect
from .thresholds import WORTH


def ranked(suspects: Sequence[Suspect]) -> tuple[Suspect, ...]:
    """Suspects with probabilities that sum to 1, the most probable first: points are logarithms of odds, worth WORTH each."""
    highest = max(suspect.points for suspect in suspects)
    odds = [math.exp(WORTH * (suspect.points - highest)) for suspect in suspects]
    total = sum(odds)
    judged = [replace(suspect, probability=each / total) for suspect, each in zip(suspects, odds, strict=True)]
    return tuple(sorted(judged, key=lambda suspect: -suspect.probability))
