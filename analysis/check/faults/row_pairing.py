"""Rows whose values belong to another sequence.

Shapes: S sequences (rows), R rows in a batch of them, T tokens in the longest sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from .. import commands
from ..finding import Fault
from ..likelihood import Hypothesis, predicting
from ..pair_data import PairData
from ..rows import CAP_NATS, MIN_OFF_NATS, Grid, grid_of, row_means, token_values

PAIRED_SHARE = 0.15
"""Maximum share of a row's difference that may remain when it is compared with another row instead. The correct row
leaves only rounding; a chance match leaves a third.
"""
_MAX_PAIRED_ROWS = 64
_CHANCE_TRIALS = 4


def _pairs(numbers: Mapping[str, Any]) -> dict[str, str]:
    names = [key for key in numbers if key.startswith("belongs_to/")][:4]
    first = ", ".join(f"{key.removeprefix('belongs_to/')} with {numbers[key]}" for key in names)
    return {"pairs": first + (", ..." if numbers["num_sequences"] > 4 else "")}


ROW_PAIRING = Fault(
    code="row_pairing",
    title="rows of the two sides belong to different sequences",
    broken="recording",
    evidence={
        "other_rows": "{num_sequences:,} of {of_sequences:,} mismatched rows match {side} of another row of the same or a "
        "neighbouring step: {pairs}"
    },
    words={"other_rows": _pairs},
)


def find_row_pairing(data: PairData) -> list[Hypothesis]:
    """Detect rows whose values in one pass match the other pass's values for a different row."""
    partner, tried = partners_of(data)
    found = np.flatnonzero(partner >= 0)
    if not len(found):
        return []
    names = data.sample.seq_ids
    tokens = np.isin(data.seq, found)
    finding = ROW_PAIRING.finding(
        data, "other_rows", tokens, weight=len(found) / max(tried, 1), next=commands.row(data, int(found[0])),
        numbers={
            "side": data.sample.b.name, "num_sequences": len(found), "of_sequences": tried,
            **{f"belongs_to/{names[i]}": names[partner[i]] for i in found[:20]},
        },
    )  # fmt: skip
    values = grid_of(data).b.copy()
    values[found] = values[partner[found]]
    cost = len(found) * np.log(max(len(names), 2))
    return [predicting(data, finding, data.a - token_values(data, values), cost, tokens, is_right=True)]


def partners_of(data: PairData) -> tuple[np.ndarray, int]:
    """Return, for each row [S], the index of the row whose values in pass b match its pass a, and the number of mismatched
    rows for which one was searched. It is -1 if a row matches itself or no other row, or if there are no more matches than
    expected by chance.
    """
    grid = grid_of(data)
    own = row_means(grid.cost())
    partner = np.full(len(own), -1)
    tried = 0
    steps = np.unique(data.sample.steps)
    rows_of = [np.flatnonzero((data.sample.steps == step) & np.isfinite(own)) for step in steps]
    for off, candidates in _tried(own, rows_of):
        tried += len(off)
        b = grid.b[candidates]
        for row in off if len(candidates) > 1 else ():
            best = _partner(grid.a[row], own[row], b)
            if best is not None and candidates[best] != row:
                partner[row] = candidates[best]
    found = np.flatnonzero(partner >= 0)
    distinct = len(np.unique(partner[found]))
    if len(found) < 2 or distinct < 0.6 * len(found) or len(found) < 0.2 * tried:
        return np.full(len(own), -1), tried
    by_chance = _by_chance(grid, own, rows_of)
    if len(found) < 2 * by_chance or len(found) < by_chance + 3.0 * np.sqrt(by_chance):
        return np.full(len(own), -1), tried
    return partner, tried


def _tried(own: np.ndarray, rows_of: list[np.ndarray]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield, for each step, its mismatched rows and their candidate partners: all rows in that step and in the
    neighbouring ones."""
    for place, rows in enumerate(rows_of):
        beside = [*rows_of[max(place - 1, 0) : place], *rows_of[place + 1 : place + 2]]
        yield rows[own[rows] > MIN_OFF_NATS][:_MAX_PAIRED_ROWS], np.concatenate([rows, *beside])


def _by_chance(grid: Grid, own: np.ndarray, rows_of: list[np.ndarray]) -> float:
    """Return the number of rows for which a partner is found by chance, i.e. among rows whose values are randomly
    permuted."""
    draw = np.random.default_rng(0)
    found = 0
    for off, candidates in _tried(own, rows_of):
        if not len(off) or len(candidates) < 2:
            continue
        mixed = grid.b[candidates]
        there = np.isfinite(mixed)
        values = mixed[there]
        for _ in range(_CHANCE_TRIALS):
            mixed[there] = draw.permutation(values)
            found += sum(_partner(grid.a[row], own[row], mixed) is not None for row in off)
    return found / _CHANCE_TRIALS


def _partner(a: np.ndarray, own: float, b: np.ndarray) -> int | None:
    """Return the index of the row in `b` that best matches `a`, [T]; None if none clearly matches."""
    off_by = np.minimum(np.abs(a - b), CAP_NATS)
    enough = np.isfinite(off_by).sum(axis=1) >= min(4, np.isfinite(a).sum())
    costs = np.where(enough, row_means(off_by), np.inf)
    costs = np.where(np.isnan(costs), np.inf, costs)
    best = int(costs.argmin())
    return best if costs[best] < PAIRED_SHARE * own else None
