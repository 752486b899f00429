"""Arrange the logprobs from both passes in arrays padded to the longest sequence.

Shapes: S sequences (rows), T tokens in the longest sequence, K kept tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .pair_data import PairData, once

CAP_NATS = 3.0
"""Maximum cost of a token when rows are compared, nats: a token that one side considers impossible weighs no more than
this."""
MIN_OFF_NATS = 0.05
"""Minimum mean |d| of a row, nats, for it to be compared with other places."""


@dataclass(frozen=True, slots=True)
class Grid:
    """[S, T] logprobs from both passes; NaN where no token is kept."""

    a: np.ndarray
    b: np.ndarray

    def cost(self, lag: int = 0) -> np.ndarray:
        """Return [S, T] |a[t] - b[t + lag]|, capped at CAP_NATS; NaN where either value is missing."""
        return np.asarray(np.minimum(np.abs(self.a - self.moved(lag)), CAP_NATS))

    def moved(self, lag: int) -> np.ndarray:
        """Return [S, T] b[t + lag]; NaN where missing."""
        moved = np.full_like(self.b, np.nan)
        width = self.b.shape[1]
        if abs(lag) < width:
            moved[:, max(0, -lag) : width - max(0, lag)] = self.b[:, max(0, lag) : width - max(0, -lag)]
        return moved

    def rows(self, chosen: np.ndarray) -> Grid:
        """Return the grid reduced to the sequences `chosen`."""
        return Grid(self.a[chosen], self.b[chosen])


@once
def grid_of(data: PairData) -> Grid:
    """Return the logprobs at the kept tokens as a grid with one row per sequence."""
    sample = data.sample
    shape = (sample.num_sequences, int(sample.lengths.max(initial=0)))
    grids = []
    for values in (data.a, data.b):
        grid = np.full(shape, np.nan)
        grid[data.seq, data.position] = values
        grids.append(grid)
    return Grid(*grids)


def mean(costs: np.ndarray) -> float:
    """Return the mean of the finite costs; infinity if there are none."""
    there = np.isfinite(costs)
    return float(costs[there].mean()) if there.any() else float("inf")


def row_means(costs: np.ndarray) -> np.ndarray:
    """Return the mean [S] of the finite costs in each row; NaN for rows without any."""
    there = np.isfinite(costs)
    count = there.sum(axis=1)
    return np.where(count > 0, np.where(there, costs, 0.0).sum(axis=1) / np.maximum(count, 1), np.nan)


def row_spreads(data: PairData, values: np.ndarray) -> np.ndarray:
    """Return the standard deviation [S] of `values`, [K], within each sequence; NaN for sequences with fewer than three
    values."""
    count = np.bincount(data.seq, minlength=data.sample.num_sequences)
    mean = np.bincount(data.seq, values, len(count)) / np.maximum(count, 1)
    squares = np.bincount(data.seq, (values - mean[data.seq]) ** 2, len(count))
    return np.where(count >= 3, np.sqrt(squares / np.maximum(count, 1)), np.nan)


def token_values(data: PairData, grid: np.ndarray) -> np.ndarray:
    """Return the values [K] of a grid, [S, T], at the kept tokens."""
    return np.asarray(grid[data.seq, data.position])
