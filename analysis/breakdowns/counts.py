"""Count and sum the compared tokens in the bins of every axis, by step.

Shapes: S steps; X probability bins and Y bins of d; B bins of a profile, with Q = 4 sums each; R ratio bins.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..statistics.estimators import Array
from .edges import (
    ENTROPIES_PER_NAT,
    MAX_ENTROPIES,
    NUM_DIFFERENCES,
    NUM_PROBABILITIES,
    NUM_RATIOS,
    Edges,
    bins_of,
    per_unit,
)  # fmt: skip
from .part import Part

BEFORE, AFTER = "before", "after"
"""Stages of a ratio: the true importance ratio, and the ratio that the loss uses after its clip."""
POSITIVE, NEGATIVE = "positive", "negative"
"""Signs of the advantage."""

NUM_SUMS = 4
"""Number of sums per profile bin: number of tokens, |d|, d squared, d."""

_CELLS = NUM_DIFFERENCES * NUM_PROBABILITIES
_STAGES, _SIGNS = (BEFORE, AFTER), (POSITIVE, NEGATIVE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Statistics of the tokens in each of B bins; NaN for empty bins."""

    num: np.ndarray
    """[B] int64, number of tokens."""
    mean_abs_d: Array
    """[B] mean of |d|, nats."""
    rms_d: Array
    """[B] root mean square of d, nats."""
    mean_d: Array
    """[B] mean of d, nats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """Counts and profiles of the tokens, using the bins of Breakdowns.edges."""

    density: np.ndarray
    """[Y, X] int64 number of tokens by d (Y) and by probability under pass b (X); the first and last bins of d include
    values outside."""
    position: Profile
    """Profile by position in the response, from 0."""
    length: Profile
    """Profile by response length in tokens."""
    entropy: Profile | None
    """Profile by recorded entropy of pass b, else of a, else of current; tokens with a non-finite entropy are in no
    bin. None if no entropy was recorded."""
    ratios: dict[tuple[str, str], np.ndarray] | None
    """("before" or "after", "positive" or "negative") -> [R] int64 number of loss terms by ln ratio, for advantages of
    that sign; the first and last bins include values outside. "before" is the ratio current / b, "after" the ratio that
    the loss uses; see part.terms_of. "after" is missing if the loss is unknown; None without advantages."""


@dataclass(slots=True, kw_only=True)
class Counts:
    """Counts and sums of the tokens, by step."""

    density: np.ndarray
    """[S, Y, X] number of tokens by d and probability."""
    position: Array
    """[S, B, Q] sums by position."""
    length: Array
    entropy: Array | None
    ratios: np.ndarray | None
    """[S, 2 stages, 2 signs, R] number of loss terms by ln ratio; only one stage if the loss is unknown."""

    def add(self, part: Counts, steps: slice) -> None:
        """Add the counts of a part, whose rows belong to `steps`."""
        for name in ("density", "position", "length", "entropy", "ratios"):
            own = getattr(self, name)
            if own is not None:
                own[steps] += getattr(part, name)

    def shapes(self, step: int | None) -> Shapes:
        """Return the breakdowns of the step with index `step`, or of all steps if `step` is None."""

        def of(values: np.ndarray) -> np.ndarray:
            return np.asarray(values.sum(axis=0) if step is None else values[step])

        return Shapes(
            density=of(self.density),
            position=profile_of(of(self.position)),
            length=profile_of(of(self.length)),
            entropy=None if self.entropy is None else profile_of(of(self.entropy)),
            ratios=None if self.ratios is None else _named(of(self.ratios)),
        )


def empty_counts(edges: Edges, num_steps: int, num_stages: int) -> Counts:
    """Return counts that are all 0."""

    def sums(bins: np.ndarray) -> Array:
        return np.zeros((num_steps, len(bins) - 1, NUM_SUMS))

    return Counts(
        density=np.zeros((num_steps, NUM_DIFFERENCES, NUM_PROBABILITIES), np.int64),
        position=sums(edges.position),
        length=sums(edges.length),
        entropy=None if edges.entropy is None else sums(edges.entropy),
        ratios=None if edges.ratio is None else np.zeros((num_steps, num_stages, 2, NUM_RATIOS), np.int64),
    )


def counts_of(part: Part, edges: Edges) -> tuple[Counts, slice]:
    """Return the counts of one part, and the steps that the part covers."""
    first, last = int(part.row_N[0]), int(part.row_N[-1])
    num_steps = last - first + 1
    segments = part.segments
    row_G = segments.row_G - first
    row_T = part.row_T - first
    return Counts(
        density=_density(part, row_T, num_steps, edges),
        position=_grouped(segments.sums_GQ.T, row_G, segments.position_G, num_steps, len(edges.position) - 1),
        length=_grouped(segments.sums_GQ.T, row_G, segments.length_G, num_steps, len(edges.length) - 1),
        entropy=None if edges.entropy is None else _entropy(part, row_T, num_steps, len(edges.entropy) - 1),
        ratios=None if edges.ratio is None else _ratios(part, first, num_steps, edges.ratio),
    ), slice(first, last + 1)


def entropy_bins(entropy: Array) -> np.ndarray:
    """Return the bin of each entropy; bins are a quarter of a nat wide."""
    return bins_of(entropy, low=0.0, per_unit=ENTROPIES_PER_NAT, num=MAX_ENTROPIES)


def _density(part: Part, row_T: np.ndarray | int, num_steps: int, edges: Edges) -> np.ndarray:
    reach = float(edges.d[-1])
    y_T = bins_of(part.d_T, low=-reach, per_unit=per_unit(NUM_DIFFERENCES, reach), num=NUM_DIFFERENCES)
    x_T = bins_of(part.p_T, low=0.0, per_unit=NUM_PROBABILITIES, num=NUM_PROBABILITIES)
    cell_T = row_T * _CELLS + y_T * NUM_PROBABILITIES + x_T
    counts = np.bincount(cell_T, minlength=num_steps * _CELLS)
    return counts.reshape(num_steps, NUM_DIFFERENCES, NUM_PROBABILITIES)


def _entropy(part: Part, row_T: np.ndarray | int, num_steps: int, num_bins: int) -> Array:
    assert part.entropy_T is not None
    fine_T = np.isfinite(part.entropy_T)
    d_T = part.d_T[fine_T]
    row_T = row_T if isinstance(row_T, int) else row_T[fine_T]
    sums = (np.ones_like(d_T), np.abs(d_T), d_T * d_T, d_T)
    return _grouped(sums, row_T, entropy_bins(part.entropy_T[fine_T]), num_steps, num_bins)


def _grouped(
    sums_Q: tuple[Array, ...] | Array, row: np.ndarray | int, bins: np.ndarray, num_steps: int, num_bins: int
) -> Array:
    """Return [S, B, Q] sums, grouped by step and bin."""
    place = row * num_bins + bins
    found = [np.bincount(place, values, num_steps * num_bins) for values in sums_Q]
    return np.asarray(np.stack(found, axis=-1).reshape(num_steps, num_bins, NUM_SUMS), np.float64)


def _ratios(part: Part, first: int, num_steps: int, edges: Array) -> np.ndarray:
    assert part.terms is not None
    terms, reach = part.terms, float(edges[-1])
    sign_K = (~terms.positive_K).astype(np.int64)
    stages = []
    for log_ratio_K in (terms.before_K, terms.after_K):
        if log_ratio_K is not None:
            bin_K = bins_of(log_ratio_K, low=-reach, per_unit=per_unit(NUM_RATIOS, reach), num=NUM_RATIOS)
            place_K = ((terms.row_K - first) * 2 + sign_K) * NUM_RATIOS + bin_K
            counts = np.bincount(place_K, minlength=num_steps * 2 * NUM_RATIOS)
            stages.append(counts.reshape(num_steps, 2, NUM_RATIOS))
    return np.stack(stages, axis=1)


def _named(ratios: np.ndarray) -> dict[tuple[str, str], np.ndarray]:
    return {
        (stage, sign): ratios[i, j] for i, stage in enumerate(_STAGES[: len(ratios)]) for j, sign in enumerate(_SIGNS)
    }


def profile_of(sums_BQ: Array) -> Profile:
    """Return a profile from [B, 4] sums per bin: number of tokens, |d|, d squared, d."""
    num_B = sums_BQ[:, 0]
    with np.errstate(invalid="ignore"):
        mean_BQ = sums_BQ[:, 1:] / np.where(num_B > 0, num_B, np.nan)[:, None]
    return Profile(
        num=num_B.astype(np.int64), mean_abs_d=mean_BQ[:, 0], rms_d=np.sqrt(mean_BQ[:, 1]), mean_d=mean_BQ[:, 2]
    )
