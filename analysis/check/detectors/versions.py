"""Weights that are not the same on both sides: behind by some steps, never synchronised, or synchronised in part."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..evidence import Evidence
from ..thresholds import MIN_CONTEXTS
from .contexts import Contexts


@dataclass(frozen=True, slots=True)
class Lagged:
    """How well one side agrees with the other side of an earlier step."""

    side: str
    """The side that is behind."""
    steps_behind: int
    left: float
    """What remains of the squared gap when the earlier step is taken, 0 to 1."""
    num: int
    """Contexts that were compared."""


def lagged(contexts: Contexts) -> Lagged | None:
    """The side and the lag at which the two agree best, over contexts that come again; None where too few do."""
    found: list[Lagged] = []
    for side, behind, ahead in (("b", contexts.b, contexts.a), ("a", contexts.a, contexts.b)):
        for lag in range(1, len(contexts.steps)):
            now, before, same = behind[lag:], ahead[:-lag], ahead[lag:]
            adjacent = (contexts.steps[lag:] - contexts.steps[:-lag] == lag)[:, None]
            both = np.isfinite(now) & np.isfinite(before) & np.isfinite(same) & adjacent
            if both.sum() < MIN_CONTEXTS:
                continue
            gap = float(np.sum((now - same)[both] ** 2))
            left = float(np.sum((now - before)[both] ** 2)) / max(gap, 1e-30)
            found.append(Lagged(side, lag, left, int(both.sum())))
    return min(found, key=lambda each: each.left) if found else None


@dataclass(frozen=True, slots=True)
class Followed:
    """How far one side moves when the other does, from step to step."""

    a_on_b: float
    """Slope of a's movement on b's: 1 when both move alike, 0 when a stands still."""
    b_on_a: float
    moved_a: float
    """Root mean square of a's movement, nats."""
    moved_b: float
    correlation: float
    num: int


def followed(contexts: Contexts) -> Followed | None:
    """Compare the movements of both sides over contexts that come again, between all pairs of steps."""
    moves_a, moves_b = [], []
    for gap in range(1, len(contexts.steps)):
        x, y = contexts.a[gap:] - contexts.a[:-gap], contexts.b[gap:] - contexts.b[:-gap]
        both = np.isfinite(x) & np.isfinite(y)
        moves_a.append(x[both])
        moves_b.append(y[both])
    x, y = (np.concatenate(moves) if moves else np.empty(0) for moves in (moves_a, moves_b))
    if len(x) < MIN_CONTEXTS:
        return None
    xx, yy, xy = float(x @ x), float(y @ y), float(x @ y)
    return Followed(
        a_on_b=xy / max(yy, 1e-30),
        b_on_a=xy / max(xx, 1e-30),
        moved_a=float(np.sqrt(xx / len(x))),
        moved_b=float(np.sqrt(yy / len(x))),
        correlation=xy / max(np.sqrt(xx * yy), 1e-30),
        num=len(x),
    )


@dataclass(frozen=True, slots=True)
class Drift:
    """How the gap's level goes from step to step, in log |d|."""

    num_steps: int
    spread: float
    """Standard deviation of the steps' levels beyond what their own errors give."""
    score: float
    """Mean square of the levels' distance from their mean, in standard errors: 1 for a constant gap."""
    growth: float
    """Standard errors by which the levels rise with the steps; negative where they fall."""


def drift(evidence: Evidence) -> Drift | None:
    """Follow the level over the steps; None for a single step."""
    level = evidence.level_beyond_tokens
    there = np.isfinite(level)
    steps, place = np.unique(evidence.sample.steps[evidence.seq[there]], return_inverse=True)
    count = np.bincount(place)
    if len(steps) < 3 or count.min() < 20:
        return None
    means = np.bincount(place, level[there]) / count
    variance = np.bincount(place, (level[there] - means[place]) ** 2) / count
    errors = np.sqrt(np.maximum(variance / count, 1e-12))
    weight = 1 / errors**2
    off = means - np.average(means, weights=weight)
    time = steps - np.average(steps, weights=weight)
    slope = np.sum(weight * time * off) / np.sum(weight * time**2)
    return Drift(
        num_steps=len(steps),
        spread=float(np.sqrt(max(np.mean(off**2) - np.mean(errors**2), 0.0))),
        score=float(np.mean((off / errors) ** 2)),
        growth=float(slope * np.sqrt(np.sum(weight * time**2))),
    )
