"""Detect values assigned to the wrong token: rows shifted as a whole, or from some position onwards."""

from __future__ import annotations

import numpy as np

from .. import commands
from ..finding import Finding
from ..pair_data import PairData
from ..thresholds import (
    CAP_NATS,
    LAG_SWITCH_NATS,
    LAGS,
    MAX_ALIGNED_ROWS,
    MAX_SHIFTED_ROWS,
    MIN_ALIGNED_TOKENS,
    MIN_ALIGNMENT_GAIN_NATS,
    MIN_LAGGED_TOKENS,
    MIN_OFF_NATS,
    MIN_PAIRED_ROWS,
    MIN_REALIGNED_ROWS,
    MIN_SHIFTED_ROWS,
    REALIGNED_SHARE,
)
from .grid import Grid, grid_of, mean, row_means


def find_shift(data: PairData) -> list[Finding]:
    """Detect that nearly all mismatched rows agree once one pass is shifted by up to three tokens."""
    grid = grid_of(data)
    off = np.flatnonzero(np.nan_to_num(row_means(grid.cost())) > MIN_OFF_NATS)
    # Rows that already agree would hide a shift that affects only part of the rows.
    grid = grid.rows(off) if len(off) >= MIN_PAIRED_ROWS else grid
    if mean(grid.cost()) < MIN_OFF_NATS:
        return []
    costs = {lag: _beside(grid, lag) for lag in LAGS if lag}
    lag = min(costs, key=lambda each: costs[each][0] / max(costs[each][1], 1e-9))
    moved, unmoved = costs[lag]
    if not moved < REALIGNED_SHARE * unmoved or _share_of_rows(grid, lag) < MIN_SHIFTED_ROWS:
        return []
    if _begins_aligned(grid):
        return []
    return [
        data.finding(
            "shift",
            "moved_rows",
            np.isin(data.seq, off) if len(off) >= MIN_PAIRED_ROWS else None,
            weight=1 - moved / unmoved,
            next=commands.sql(
                data,
                "SELECT step, seq_id, position, token_id, logprob_a, logprob_b, "
                f"lead(logprob_b, {lag}) OVER (PARTITION BY step, seq_id ORDER BY position) AS moved FROM {{pair}} "
                "ORDER BY step, seq_id, position LIMIT 40",
            ),
            numbers={"lag": lag, "moved": moved, "unmoved": unmoved, **data.names},
        )
    ]


def find_retokenised(data: PairData) -> list[Finding]:
    """Detect rows that agree up to a position and, after it, only when shifted: the text was retokenised at that
    position."""
    grid = grid_of(data)
    costs = row_means(grid.cost())
    suspects = np.argsort(-np.nan_to_num(costs), kind="stable")[:MAX_ALIGNED_ROWS]
    suspects = suspects[np.nan_to_num(costs[suspects]) > MIN_OFF_NATS]
    if not len(suspects):
        return []
    lags, gains = align(grid.rows(suspects))
    lagged = (lags != 0).sum(axis=1)
    zero = np.nansum(grid.rows(suspects).cost(), axis=1)
    moved = (gains > MIN_ALIGNMENT_GAIN_NATS) & (gains > 0.5 * zero) & (lagged >= MIN_LAGGED_TOKENS)
    if moved.sum() < min(2, max(1, MIN_REALIGNED_ROWS * len(suspects))):
        return []
    rows = suspects[moved]
    onset = [int(np.flatnonzero(path)[0]) for path in lags[moved]]
    first = int(rows[0])
    # If the lag changes right after masked tokens, a turn was joined at the wrong place; the text itself is the same.
    joined = np.mean([_follows_a_hole(grid.a[row], place) for row, place in zip(rows, onset, strict=True)]) > 0.8
    return [
        data.finding(
            "shift" if joined else "retokenised",
            "moved_after_place",
            np.isin(data.seq, rows),
            weight=float(1 - (zero - gains)[moved].sum() / max(zero[moved].sum(), 1e-9)),
            next=commands.row(data, first),
            numbers={
                "num_sequences": len(rows),
                "of_sequences": len(suspects),
                "seq_id": data.sample.seq_ids[first],
                "first_place": min(onset),
                "last_place": max(onset),
                "lags": ", ".join(str(lag) for lag in np.unique(lags[moved]) if lag),
            },
        )
    ]


def align(grid: Grid) -> tuple[np.ndarray, np.ndarray]:
    """Return the lag of pass b at each token, [S, T], that minimises the cost per row, and the cost saved relative to
    no lag, [S] nats.

    Each change of the lag costs LAG_SWITCH_NATS, as does a non-zero lag at the start of a row. A token without a
    partner costs half of CAP_NATS, about the difference between two unrelated logprobs.
    """
    rows, width = grid.a.shape
    there = np.isfinite(grid.a)
    none = 0.5 * CAP_NATS
    costs = np.stack([np.where(there, np.nan_to_num(grid.cost(lag), nan=none), 0.0) for lag in LAGS])
    home = LAGS.index(0)
    best = np.full((len(LAGS), rows), LAG_SWITCH_NATS)
    best[home] = 0.0
    came = np.empty((width, len(LAGS), rows), np.int8)
    for t in range(width):
        cheapest = best.argmin(axis=0)
        switched = best.min(axis=0) + LAG_SWITCH_NATS
        stays = best <= switched
        came[t] = np.where(stays, np.arange(len(LAGS))[:, None], cheapest)
        best = np.where(stays, best, switched) + costs[:, :, t]
    path = np.empty((rows, width), np.int64)
    state = best.argmin(axis=0)
    for t in reversed(range(width)):
        path[:, t] = state
        state = came[t][state, np.arange(rows)]
    lags = np.where(there, np.array(LAGS)[path], 0)
    return lags, costs[home].sum(axis=1) - best.min(axis=0)


def _beside(grid: Grid, lag: int) -> tuple[float, float]:
    """Return the mean cost with and without the lag, over the tokens for which both costs are defined."""
    moved, unmoved = grid.cost(lag), grid.cost()
    both = np.isfinite(moved) & np.isfinite(unmoved)
    if not both.any():
        return float("inf"), 1.0
    return float(moved[both].mean()), float(unmoved[both].mean())


def _share_of_rows(grid: Grid, lag: int) -> float:
    """Return the share of the mismatched rows that agree better when shifted by the lag."""
    moved, unmoved = row_means(grid.cost(lag)), row_means(grid.cost())
    off = np.isfinite(moved) & (unmoved > MIN_OFF_NATS)
    return float(np.mean(moved[off] < 0.6 * unmoved[off])) if off.any() else 0.0


def _begins_aligned(grid: Grid) -> bool:
    """Return True if most mismatched rows are aligned at their beginning and shifted only later."""
    off = np.flatnonzero(np.nan_to_num(row_means(grid.cost())) > MIN_OFF_NATS)[:MAX_SHIFTED_ROWS]
    if np.isfinite(grid.a[off]).sum(axis=1).max(initial=0) < MIN_ALIGNED_TOKENS:
        return False  # in rows this short, no shift can save the cost of changing the lag
    lags, _ = align(grid.rows(off))
    return float(np.mean(lags[:, :4].any(axis=1))) < 0.5


def _follows_a_hole(logprobs: np.ndarray, place: int) -> bool:
    """Return True if a position directly follows a gap: tokens without a value that come after tokens with a value."""
    first = max(place - 4, 0)
    hole = np.isnan(logprobs[first : place + 1])
    return bool(hole.any() and np.isfinite(logprobs[: first + int(np.argmax(hole))]).any())
