"""Rows that belong to other sequences, and which."""

from __future__ import annotations

import numpy as np

from .. import commands
from ..finding import Finding
from ..pair_data import PairData
from ..thresholds import (
    CAP_NATS,
    MAX_PAIRED_ROWS,
    MIN_OFF_NATS,
    MIN_PAIRED_ROWS,
    MIN_PAIRED_TOKENS,
    PAIRED_SHARE,
)
from .grid import Grid, grid_of, row_means


def find_row_pairing(data: PairData) -> list[Finding]:
    """Rows of a step that agree with the other side of another row."""
    grid = grid_of(data)
    own = row_means(grid.cost())
    partner = np.full(len(own), -1)
    tried = 0
    steps = np.unique(data.sample.steps)
    rows_of = [np.flatnonzero((data.sample.steps == step) & np.isfinite(own)) for step in steps]
    for place, rows in enumerate(rows_of):
        off = rows[own[rows] > MIN_OFF_NATS][:MAX_PAIRED_ROWS]
        tried += len(off)
        candidates = np.concatenate([rows, *rows_of[max(place - 1, 0) : place], *rows_of[place + 1 : place + 2]])
        if len(off) and len(candidates) > 1:
            _match(grid, own, off, candidates, partner)
    found = np.flatnonzero(partner >= 0)
    distinct = len(np.unique(partner[found]))
    if len(found) < MIN_PAIRED_ROWS or distinct < 0.6 * len(found) or len(found) < 0.2 * tried:
        return []
    names = data.sample.seq_ids
    return [
        data.finding(
            "row_pairing",
            "other_rows",
            np.isin(data.seq, found),
            weight=len(found) / max(tried, 1),
            next=commands.row(data, int(found[0])),
            numbers={
                "side": data.sample.b.name,
                "num_sequences": len(found),
                "of_sequences": tried,
                **{f"belongs_to/{names[i]}": names[partner[i]] for i in found[:20]},
            },
        )
    ]


def _match(grid: Grid, own: np.ndarray, off: np.ndarray, rows: np.ndarray, partner: np.ndarray) -> None:
    """Note for each row that is off which row's b it agrees with, where one clearly does."""
    b = grid.b[rows]
    for row in off:
        off_by = np.minimum(np.abs(grid.a[row] - b), CAP_NATS)
        enough = np.isfinite(off_by).sum(axis=1) >= min(MIN_PAIRED_TOKENS, np.isfinite(grid.a[row]).sum())
        costs = np.where(enough, row_means(off_by), np.inf)
        costs = np.where(np.isnan(costs), np.inf, costs)
        best = int(costs.argmin())
        if rows[best] != row and costs[best] < PAIRED_SHARE * own[row]:
            partner[row] = rows[best]
