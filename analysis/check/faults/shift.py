"""Rows whose values are shifted: as a whole, or from some position onwards where the text was tokenised again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .. import commands
from ..finding import Fault
from ..likelihood import Hypothesis, located, predicting
from ..pair_data import PairData
from ..rows import CAP_NATS, MIN_OFF_NATS, Grid, grid_of, mean, row_means, token_values

REALIGNED_SHARE = 0.35
"""Maximum share of the difference that may remain after a row is shifted: the correct shift leaves only rounding, any other
more than half."""
LAGS = (-3, -2, -1, 0, 1, 2, 3)
"""Shifts tried, in tokens; a positive shift means that the values of pass b come later."""
LAG_SWITCH_NATS = 2.0
"""Cost, nats, of each change of the lag within a row. It equals the disagreement at about two tokens, so that noise alone
does not cause a change."""
_MAX_ALIGNED_ROWS = 256
_ROWS_OFF = "{num_sequences:,} of {of_sequences:,} mismatched rows"


def _moved(numbers: Mapping[str, Any]) -> dict[str, str]:
    lag = numbers["lag"]
    return {
        "tokens_off": f"{abs(lag)} token{'s' if abs(lag) > 1 else ''}",
        "direction": "later" if lag > 0 else "earlier",
    }


def _joined(numbers: Mapping[str, Any]) -> dict[str, str]:
    is_shift = numbers["code"] == "shift"
    joined, retokenised = (
        "the turns were joined with an offset of one",
        "the text was decoded and re-encoded into different tokens",
    )
    return {"joined_text": joined if is_shift else retokenised}


_EVIDENCE = {
    "reversed": "the values of {b} run backwards along each sequence: read from the end, they differ from those of {a} "
    "by {moved:.2g} nats on average",
    "moved_rows": "{b} is {tokens_off} {direction} than {a}: shifted back, the two differ by {moved:.2g} nats per token on "
    f"average, unshifted by {{unmoved:.2g}} (each capped at {CAP_NATS:g})",
    "moved_after_place": f"{_ROWS_OFF} agree up to a token (at position {{first_place}} to {{last_place}}) and, shifted by "
    "{lags} tokens, after it: {joined_text}",
    "impossible_after_place": f"{_ROWS_OFF} agree up to a position that differs by row (token {{first_place}} to "
    "{last_place}), where one side considers the token impossible, and differ by {effect:.2g} nats rms from there on: "
    "the two "
    "sides scored different tokens",
}
_WORDS = {"moved_rows": _moved, "moved_after_place": _joined}

SHIFT = Fault(
    code="shift", title="one side is shifted by a token", broken="recording", evidence=_EVIDENCE, words=_WORDS
)
RETOKENISED = Fault(
    code="retokenised", title="the two sides scored different tokenisations of the text", broken="recording",
    evidence=_EVIDENCE, words=_WORDS,
)  # fmt: skip


def find_shift(data: PairData) -> list[Hypothesis]:
    """Detect that nearly all mismatched rows agree once one pass is shifted by up to three tokens."""
    grid = grid_of(data)
    off = np.flatnonzero(np.nan_to_num(row_means(grid.cost())) > MIN_OFF_NATS)
    # Rows that already agree would hide a shift that affects only part of the rows.
    grid = grid.rows(off) if len(off) >= 2 else grid
    if mean(grid.cost()) < MIN_OFF_NATS:
        return []
    costs = {lag: _beside(grid, lag) for lag in LAGS if lag}
    lag = min(costs, key=lambda each: costs[each][0] / max(costs[each][1], 1e-9))
    moved, unmoved = costs[lag]
    if not moved < REALIGNED_SHARE * unmoved or _share_of_rows(grid, lag) < 0.8 or _begins_aligned(grid):
        return []
    tokens = np.isin(data.seq, off) if len(off) >= 2 else np.ones(data.num_kept, bool)
    finding = SHIFT.finding(
        data, "moved_rows", tokens, weight=1 - moved / unmoved,
        next=commands.sql(
            data,
            "SELECT step, seq_id, position, token_id, logprob_a, logprob_b, "
            f"lead(logprob_b, {lag}) OVER (PARTITION BY step, seq_id ORDER BY position) AS moved FROM {{pair}} "
            "ORDER BY step, seq_id, position LIMIT 40",
        ),
        numbers={"lag": lag, "moved": moved, "unmoved": unmoved, **data.names},
    )  # fmt: skip
    residual = data.a - token_values(data, grid_of(data).moved(lag))
    return [predicting(data, finding, residual, np.log(len(LAGS)), tokens, is_right=True)]


def find_reversed(data: PairData) -> list[Hypothesis]:
    """Detect that the values of pass b run backwards along each row."""
    grid = grid_of(data)
    there = np.isfinite(grid.b)
    values = np.full_like(grid.b, np.nan)
    for row in np.flatnonzero(there.sum(axis=1) > 3):
        values[row, there[row]] = grid.b[row, there[row]][::-1]
    tokens = np.isfinite(token_values(data, values))
    residual = data.a - token_values(data, values)
    if not tokens.any() or np.median(np.abs(residual[tokens])) > REALIGNED_SHARE * np.median(np.abs(data.d[tokens])):
        return []
    size = float(np.mean(np.abs(residual[tokens])))
    finding = SHIFT.finding(
        data, "reversed", tokens, next=commands.tokens(data), numbers={"moved": size, **data.names}
    )  # fmt: skip
    return [predicting(data, finding, residual, 1.0, tokens, is_right=True)]


def find_retokenised(data: PairData) -> list[Hypothesis]:
    """Detect rows that agree up to a position and, after it, only when shifted: the text was retokenised at that
    position."""
    grid = whole = grid_of(data)
    costs = row_means(grid.cost())
    suspects = np.argsort(-np.nan_to_num(costs), kind="stable")[:_MAX_ALIGNED_ROWS]
    suspects = suspects[np.nan_to_num(costs[suspects]) > MIN_OFF_NATS]
    if not len(suspects):
        return []
    lags, gains = align(grid.rows(suspects))
    lagged = (lags != 0).sum(axis=1)
    zero = np.nansum(grid.rows(suspects).cost(), axis=1)
    moved = (gains > 4.0) & (gains > 0.5 * zero) & (lagged >= 3)
    if moved.sum() < min(2, max(1, 0.05 * len(suspects))):
        return []
    rows = suspects[moved]
    onset = [int(np.flatnonzero(path)[0]) for path in lags[moved]]
    first = int(rows[0])
    # If the lag changes right after masked tokens, a turn was joined at the wrong place; the text itself is the same.
    joined = np.mean([_follows_a_hole(grid.a[row], place) for row, place in zip(rows, onset, strict=True)]) > 0.8
    tokens = np.isin(data.seq, rows)
    finding = (SHIFT if joined else RETOKENISED).finding(
        data, "moved_after_place", tokens, weight=float(1 - (zero - gains)[moved].sum() / max(zero[moved].sum(), 1e-9)),
        next=commands.row(data, first),
        numbers={
            "num_sequences": len(rows), "of_sequences": len(suspects), "seq_id": data.sample.seq_ids[first],
            "first_place": min(onset), "last_place": max(onset),
            "lags": ", ".join(str(lag) for lag in np.unique(lags[moved]) if lag),
        },
    )  # fmt: skip
    values = whole.b.copy()
    for place, row in enumerate(suspects[moved]):
        width = np.arange(values.shape[1])
        at = np.clip(width + lags[moved][place], 0, values.shape[1] - 1)
        values[row] = whole.b[row][at]
    cost = len(rows) * np.log(len(LAGS) * max(values.shape[1], 2))
    return [predicting(data, finding, data.a - token_values(data, values), cost, tokens, is_right=True)]


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
    off = np.flatnonzero(np.nan_to_num(row_means(grid.cost())) > MIN_OFF_NATS)[:64]
    if np.isfinite(grid.a[off]).sum(axis=1).max(initial=0) < 6:
        return False  # in rows this short, no shift can save the cost of changing the lag
    lags, _ = align(grid.rows(off))
    return float(np.mean(lags[:, :4].any(axis=1))) < 0.5


def _follows_a_hole(logprobs: np.ndarray, place: int) -> bool:
    """Return True if a position directly follows a gap: tokens without a value that come after tokens with a value."""
    first = max(place - 4, 0)
    hole = np.isnan(logprobs[first : place + 1])
    return bool(hole.any() and np.isfinite(logprobs[: first + int(np.argmax(hole))]).any())


def find_broken(data: PairData) -> list[Hypothesis]:
    """Detect rows in which the two passes scored different text from some position onwards, starting with a token that
    one pass considers impossible."""
    grid = grid_of(data)
    cost = grid.cost()
    off = np.flatnonzero(np.nan_to_num(row_means(cost)) > MIN_OFF_NATS)
    places = {
        int(row): place for row in off if (place := _impossible_from(cost[row], grid.a[row], grid.b[row])) is not None
    }
    if len(places) < max(2, 0.4 * len(off)) or np.std(list(places.values())) < 1:
        return []
    place_of = np.full(data.sample.num_sequences, np.iinfo(np.int64).max)
    place_of[list(places)] = list(places.values())
    first = next(iter(places))
    tokens = data.position >= place_of[data.seq]
    finding = RETOKENISED.finding(
        data, "impossible_after_place", tokens, weight=len(places) / len(off), next=commands.row(data, first),
        numbers={
            "num_sequences": len(places), "of_sequences": len(off), "seq_id": data.sample.seq_ids[first],
            "first_place": min(places.values()), "last_place": max(places.values()),
        },
    )  # fmt: skip
    return [located(data, finding, tokens, len(places) * np.log(max(cost.shape[1], 2)))]


def _impossible_from(cost: np.ndarray, a: np.ndarray, b: np.ndarray) -> int | None:
    """Return the position of an impossible token with agreement before it and little agreement after it; None if there
    is none."""
    there = np.flatnonzero(np.isfinite(cost))
    big = there[cost[there] > 1.0]
    if not len(big):
        return None
    place = int(big[0])
    before, after = cost[there[there < place]], cost[there[there >= place]]
    agrees = not len(before) or before.max() < 1.0 / 2
    surprised = min(a[place], b[place]) < -5.0
    return place if agrees and surprised and len(after) > 1 and np.median(after) > 1.0 / 2 else None
