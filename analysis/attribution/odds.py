"""From the points of suspects to their probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from .factors import FACTORS, SET
from .suspect import Suspect
from .thresholds import WORTH


def ranked(suspects: Sequence[Suspect], worth: float = WORTH) -> tuple[Suspect, ...]:
    """Suspects with probabilities that sum to 1, the most probable first: points are logarithms of odds, of which each counts `worth`."""
    highest = max(suspect.points for suspect in suspects)
    odds = [math.exp(worth * (suspect.points - highest)) for suspect in suspects]
    total = sum(odds)
    judged = [replace(suspect, probability=each / total) for suspect, each in zip(suspects, odds, strict=True)]
    return tuple(sorted(judged, key=lambda suspect: -suspect.probability))


def kind_of(suspect: str, code: str) -> str:
    """The key of FACTORS for evidence of a suspect; a setting that somebody changed counts alike for all of them."""
    return code if code == SET else f"{suspect}.{code}"


def weighed(suspect: Suspect) -> Suspect:
    """A suspect whose evidence has the points that falls of other laboratories say, FACTORS times those of the rules."""
    factors = [FACTORS.get(kind_of(suspect.code, evidence.code), 1.0) for evidence in suspect.evidence]
    evidence = [
        replace(each, points=factor * each.points) for each, factor in zip(suspect.evidence, factors, strict=True)
    ]
    return replace(suspect, evidence=tuple(evidence))
