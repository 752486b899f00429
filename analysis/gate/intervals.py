"""Intervals over sequences: tokens of one sequence hang together, so that resampling tokens would give too narrow ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import Any

import numpy as np

from ..totals import FROM_SUMS, Array
from .sums import LARGEST, SequenceColumns

SEED = 20_260_000
"""Of every resampling: the same trace gives the same interval."""

RESAMPLES = 1_000

PARTS = 20
"""Groups of sequences that are left out in turn."""

Interval = tuple[float, float]


def bootstrap(columns: SequenceColumns, metrics: Sequence[str], confidence: float) -> dict[str, Interval | None]:
    """Percentile bootstrap (Efron 1979) of statistics that follow from sums of sequences, or are the largest of them.

    Sequences are drawn with replacement RESAMPLES times. The largest value of a resample is never above the run's own: the
    interval of a maximum says how far down it would be without its top sequences, and ends at the value itself.
    """
    from_sums = [name for name in metrics if name in FROM_SUMS]
    largest = [name for name in metrics if name in LARGEST]
    draw = np.random.default_rng(SEED)
    names = list(columns.values)
    table_cn = np.stack([columns.values[name] for name in names])
    totals_rc = np.empty((RESAMPLES, len(names)))
    tops = {name: np.empty(RESAMPLES) for name in largest}
    for place in range(RESAMPLES):
        drawn_n = draw.integers(0, len(columns), len(columns))
        counts_n = np.bincount(drawn_n, minlength=len(columns)).astype(np.float64)
        with np.errstate(invalid="ignore", over="ignore"):
            # No BLAS: its threads wait for each other where cores are busy, fifty times as long as this takes.
            totals_rc[place] = np.einsum("cn,n->c", table_cn, counts_n)
        for name in largest:
            tops[name][place] = columns.largest[LARGEST[name]][drawn_n].max()
    totals = {name: totals_rc[:, i] for i, name in enumerate(names)}
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        samples = {name: FROM_SUMS[name](totals) for name in from_sums} | tops
    return {name: percentiles(values, confidence) for name, values in samples.items()}


def bootstrap_share(counts: Array, numbers: Array, confidence: float) -> Interval | None:
    """Percentile bootstrap over sequences of the share sum(counts) / sum(numbers)."""
    draw = np.random.default_rng(SEED)
    shares = np.empty(RESAMPLES)
    for place in range(RESAMPLES):
        drawn = draw.integers(0, len(counts), len(counts))
        shares[place] = counts[drawn].sum() / numbers[drawn].sum()
    return percentiles(shares, confidence)


def jackknife(
    num_sequences: int, value: float, without: Callable[[Array], float], confidence: float
) -> Interval | None:
    """Delete-a-group jackknife (Kott 2001) of any number: value -+ t sqrt((G - 1) / G sum (value_g - mean)^2).

    `without` gives the number when the sequences of these places are left out. G = PARTS groups, or as many as there are
    sequences; None with fewer than six, or where a replicate is not finite.
    """
    num_parts = min(PARTS, num_sequences)
    if num_parts < 6 or not math.isfinite(value):
        return None
    places = np.random.default_rng(SEED).permutation(num_sequences)
    replicates = np.array([without(np.sort(places[part::num_parts])) for part in range(num_parts)])
    if not np.isfinite(replicates).all():
        return None
    error = math.sqrt((num_parts - 1) / num_parts * float(((replicates - replicates.mean()) ** 2).sum()))
    reach = student_quantile((1 + confidence) / 2, num_parts - 1) * error
    return value - reach, value + reach


def student_quantile(probability: float, freedom: int) -> float:
    """Quantile of Student's t from the normal one (Abramowitz and Stegun 26.7.5); within 0.001 from 5 degrees of
    freedom on, which is where `jackknife` begins.

    >>> round(student_quantile(0.975, 19), 3)
    2.093
    """
    z = NormalDist().inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / freedom**power for power, term in enumerate(terms, 1))


def percentiles(values: np.ndarray[Any, Any], confidence: float) -> Interval | None:
    """The middle part of resampled values; None where a resample has no value."""
    if np.isnan(values).any():
        return None
    # An observation each, since between two infinities there is no number.
    low, high = np.quantile(values, [(1 - confidence) / 2, (1 + confidence) / 2], method="closest_observation")
    return float(low), float(high)
