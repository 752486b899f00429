"""Detect rows that agree up to some position and disagree after it, the position differing by row."""

from __future__ import annotations

import numpy as np

from .. import commands
from ..finding import Finding
from ..pair_data import PairData
from ..thresholds import BROKEN_NATS, MIN_BROKEN_ROWS, MIN_OFF_NATS, SURPRISING_NATS
from .grid import grid_of, row_means


def find_broken(data: PairData) -> list[Finding]:
    """Detect rows in which the two passes scored different text from some position onwards, starting with a token that
    one pass considers impossible."""
    grid = grid_of(data)
    cost = grid.cost()
    off = np.flatnonzero(np.nan_to_num(row_means(cost)) > MIN_OFF_NATS)
    places = {int(row): place for row in off if (place := _place(cost[row], grid.a[row], grid.b[row])) is not None}
    if len(places) < max(2, MIN_BROKEN_ROWS * len(off)) or np.std(list(places.values())) < 1:
        return []
    place_of = np.full(data.sample.num_sequences, np.iinfo(np.int64).max)
    place_of[list(places)] = list(places.values())
    first = next(iter(places))
    return [
        data.finding(
            "retokenised",
            "impossible_after_place",
            data.position >= place_of[data.seq],
            weight=len(places) / len(off),
            next=commands.row(data, first),
            numbers={
                "num_sequences": len(places),
                "of_sequences": len(off),
                "seq_id": data.sample.seq_ids[first],
                "first_place": min(places.values()),
                "last_place": max(places.values()),
            },
        )
    ]


def _place(cost: np.ndarray, a: np.ndarray, b: np.ndarray) -> int | None:
    """Return the position of an impossible token with agreement before it and little agreement after it; None if there
    is none."""
    there = np.flatnonzero(np.isfinite(cost))
    big = there[cost[there] > BROKEN_NATS]
    if not len(big):
        return None
    place = int(big[0])
    before, after = cost[there[there < place]], cost[there[there >= place]]
    agrees = not len(before) or before.max() < BROKEN_NATS / 2
    surprised = min(a[place], b[place]) < SURPRISING_NATS
    return place if agrees and surprised and len(after) > 1 and np.median(after) > BROKEN_NATS / 2 else None
