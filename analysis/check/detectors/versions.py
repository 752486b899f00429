"""Weights that are not the same on both sides: behind by some steps, never synchronised, or synchronised in part."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..evidence import Evidence
from ..thresholds import MIN_CONTEXTS, MOVEMENT_SHRINKAGE
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
    """How the gap's size goes from step to step."""

    num_steps: int
    spread: float
    """Standard deviation of log rms over the steps, beyond what their own errors give."""
    score: float
    """Mean square of the steps' distance from their mean, in standard errors: 1 for a constant gap."""
    growth: float
    """Standard errors by which the gap rises with the steps; negative where it falls."""


def along_movement(evidence: Evidence) -> float:
    """Standard errors by which the gap points along the movement of pass a over the steps; 0 for fewer than three steps.

    For a token after a token, the mean of d is held against how a's logprob of it goes with the steps: their product is 0
    on average for a rounding of any kind, above it where b is behind a, and below it where a is behind b. Errors are those
    of sums over sequences. What d owes to the size of the logprob is taken out first.
    """
    sample = evidence.sample
    steps = sample.steps[evidence.seq].astype(float)
    if len(np.unique(steps)) < 3 or not evidence.num_kept:
        return 0.0
    tokens = sample.tokens.astype(np.int64)
    before = np.concatenate([[-1], tokens[:-1]])
    before[sample.starts[:-1][sample.lengths > 0]] = -1
    _, place = np.unique((tokens * (tokens.max() + 2) + before)[evidence.keep], return_inverse=True)
    count = np.bincount(place)
    d = np.clip(evidence.d, *np.array([-3.0, 3.0]) * evidence.rms())
    bins = np.digitize(evidence.a, np.quantile(evidence.a, np.linspace(0, 1, 11)[1:-1]))
    d = d - (np.bincount(bins, d) / np.maximum(np.bincount(bins), 1))[bins]
    gap = np.bincount(place, d) / (count + MOVEMENT_SHRINKAGE)
    moved = np.clip(evidence.a - (np.bincount(place, evidence.a) / count)[place], -3, 3)
    since = steps - (np.bincount(place, steps) / count)[place]
    products = np.bincount(evidence.seq, gap[place] * since * moved)
    return float(products.sum() / max(np.sqrt(np.sum(products**2)), 1e-30))


def drift(evidence: Evidence) -> Drift | None:
    """Follow the root mean square of |d| / (1 - p) over the steps, its largest fiftieth clipped; None for fewer than three
    steps with three sequences each. Errors are those of means over sequences.
    """
    there = np.isfinite(evidence.noise)
    noise, seq, sample = evidence.noise[there], evidence.seq[there], evidence.sample
    if not len(noise):
        return None
    squares = np.minimum(noise, np.quantile(noise, 0.98)) ** 2
    num = np.bincount(seq, minlength=sample.num_sequences)
    total = np.bincount(seq, squares, minlength=sample.num_sequences)
    levels, errors, times = [], [], []
    for step in np.unique(sample.steps):
        rows = (sample.steps == step) & (num > 0)
        if rows.sum() < 3 or not total[rows].any():
            continue
        mean = total[rows].sum() / num[rows].sum()
        residual = total[rows] - mean * num[rows]
        error = np.sqrt(np.sum(residual**2) * rows.sum() / (rows.sum() - 1)) / num[rows].sum()
        levels.append(0.5 * np.log(mean))
        errors.append(max(0.5 * error / mean, 1e-6))
        times.append(float(step))
    return _drift(np.array(levels), np.array(errors), np.array(times)) if len(levels) >= 3 else None


def _drift(levels: np.ndarray, errors: np.ndarray, times: np.ndarray) -> Drift:
    weight = 1 / errors**2
    off = levels - np.average(levels, weights=weight)
    time = times - np.average(times, weights=weight)
    return Drift(
        num_steps=len(levels),
        spread=float(np.sqrt(max(np.var(levels) - np.mean(errors**2), 0.0))),
        score=float(np.sum((off / errors) ** 2) / (len(levels) - 1)),
        growth=float(np.sum(weight * time * off) / np.sqrt(np.sum(weight * time**2))),
    )
