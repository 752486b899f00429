"""Infer the precision of logits from logprobs: in one context, the logprobs of two tokens differ by as much as their
logits.

Logits above 1 that were rounded to bfloat16 are multiples of 2^-7; logits above 1/4 that were rounded to float16 are
multiples of 2^-12. Differences between two such logits are multiples too, whatever the dtype of the softmax. If the
logits were then divided by a temperature, the grid spacing is divided as well.
"""

from __future__ import annotations

import numpy as np

from ..pair_data import PairData
from ..thresholds import GRID_CHANCE, GRID_TOLERANCE, MIN_GRID_PAIRS, MIN_GRID_SHARE, TEMPERATURES

GRIDS = {"bfloat16": 2.0**7, "float16": 2.0**12}
"""dtype -> number of grid steps per nat, for logits above 1 (bfloat16) or 1/4 (float16)."""


def logit_precision(data: PairData) -> tuple[str | None, str | None]:
    """Return the dtype to which the logits in pass a and in pass b were rounded: `bfloat16`, `float16` or `float32`;
    None if too few pairs of tokens share a context."""
    first, second = _pairs(data)
    recorded = data.sample.settings["temperature"]
    temperatures = {1.0} | ({float(np.nanmedian(recorded))} if np.isfinite(recorded).any() else set(TEMPERATURES))
    found = [_of(values[first] - values[second], sorted(temperatures)) for values in (data.a, data.b)]
    return found[0], found[1]


def _of(difference: np.ndarray, temperatures: list[float]) -> str | None:
    # Small differences are always near a grid point, and for large ones the logprob's own rounding error is too large.
    difference = np.unique(difference[(np.abs(difference) > 0.02) & (np.abs(difference) < 30)])
    if len(difference) < MIN_GRID_PAIRS:
        return None
    for dtype, steps in GRIDS.items():
        by_chance = 2 * GRID_TOLERANCE[dtype]
        for temperature in {1.0, *temperatures}:
            scaled = difference * temperature * steps
            share = float(np.mean(np.abs(scaled - np.round(scaled)) < GRID_TOLERANCE[dtype]))
            if share > MIN_GRID_SHARE and len(temperatures) * _chance(share, by_chance, len(difference)) < GRID_CHANCE:
                return dtype
    return "float32"


def _chance(share: float, by_chance: float, num: int) -> float:
    """Return the Chernoff bound on the probability that at least `share` of `num` differences are on a grid by
    chance."""
    share = min(share, 1 - 1e-9)
    divergence = share * np.log(share / by_chance) + (1 - share) * np.log((1 - share) / (1 - by_chance))
    return float(np.exp(-num * divergence))


def _pairs(data: PairData) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of pairs of kept tokens with different ids in the same context and step."""
    keys = data.sample.prefix_keys[data.keep]
    steps = data.sample.steps[data.seq]
    tokens = data.sample.tokens[data.keep]
    order = np.lexsort((tokens, keys, steps))
    one, two = order[:-1], order[1:]
    pair = (keys[one] == keys[two]) & (steps[one] == steps[two]) & (tokens[one] != tokens[two])
    return one[pair], two[pair]
