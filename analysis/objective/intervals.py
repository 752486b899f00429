"""Intervals over groups: the sequences of a prompt share a baseline, and tokens of a sequence hang together."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..gate.intervals import RESAMPLES, SEED, Interval, percentiles
from ..totals import Array
from .figures import Figure, summed, values_of

MOST_UNITS = 4096
"""Groups that are resampled; of more of them each n-th is added to one unit, which leaves the spread of sums as it is."""

_BLOCK = 1 << 17
"""Draws that are worked on at once."""


def bootstrap(
    figures: Mapping[str, Figure], columns: Mapping[str, Array], units: np.ndarray, num_updates: int, confidence: float
) -> dict[str, Interval | None]:
    """Percentile bootstrap (Efron 1979) of the run's figures over groups; None of less than two groups.

    Groups are drawn with replacement RESAMPLES times from the whole run, as many as there are, and a drawn group brings all
    of its sums: numerator and denominator of a ratio are added up over the same draw, and then divided. What weighs a token
    within its update (the number of its tokens or sequences), and the number of updates, stay as they were recorded. With a
    fixed seed: the same trace gives the same interval.
    """
    names, places = np.unique(units, return_inverse=True)
    places = places.reshape(-1) % MOST_UNITS
    number = min(len(names), MOST_UNITS)
    if number < 2:
        return dict.fromkeys(figures)
    by_unit = summed(columns, places, number)
    kept = list(by_unit)
    table_CG = np.stack([by_unit[name] for name in kept])
    draw = np.random.default_rng(SEED)
    totals_RC = np.empty((RESAMPLES, len(kept)))
    at_once = max(1, _BLOCK // number)
    for first in range(0, RESAMPLES, at_once):
        resamples = min(at_once, RESAMPLES - first)
        drawn_RG = draw.integers(0, number, (resamples, number)) + np.arange(resamples)[:, None] * number
        counts_RG = np.bincount(drawn_RG.reshape(-1), minlength=resamples * number).reshape(resamples, number)
        # No BLAS: its threads wait for each other where cores are busy.
        totals_RC[first : first + resamples] = np.einsum("cg,rg->rc", table_CG, counts_RG.astype(np.float64))
    totals = {name: totals_RC[:, i] for i, name in enumerate(kept)}
    totals["num_updates"] = np.full(RESAMPLES, float(num_updates))
    return {name: percentiles(values, confidence) for name, values in values_of(figures, totals).items()}
