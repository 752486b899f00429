"""Detect positions inside sequences at which the size of the mismatch changes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .. import commands
from ..finding import Finding
from ..pair_data import PairData
from ..thresholds import (
    MIN_CUT_TOKENS,
    MIN_LEVEL_RATIO,
    MIN_OWN_SCORE,
    MIN_PLACE_SCORE,
    MIN_PLACE_SEQUENCES,
    MIN_SIDE_POSITIONS,
    MIN_SIDE_TOKENS,
    MIN_STEEPNESS,
)
from .numerics import allowed_noise, precisions


@dataclass(frozen=True, slots=True)
class LevelChange:
    """A change point between two levels."""

    place: int
    """First position after the change."""
    change: float
    """Mean after the change minus mean before it."""
    explained: float
    """Sum of squares explained by the change: that between the parts before and after it."""


@dataclass(frozen=True, slots=True)
class Levels:
    """Centred level, sequence and position, each [L], of the L kept tokens with a finite level."""

    y: np.ndarray
    seq: np.ndarray
    position: np.ndarray
    there: np.ndarray
    """[K] bool: True for kept tokens with a finite level."""

    @classmethod
    def of(cls, data: PairData) -> Levels | None:
        """Return the levels of the kept tokens; None if there are too few to search for a change."""
        level = data.level_beyond_tokens
        there = np.isfinite(level)
        if there.sum() < 4 * MIN_SIDE_TOKENS:
            return None
        y = level[there]
        return cls(y - y.mean(), data.seq[there], data.position[there], there)


def find_onset(data: PairData) -> list[Finding]:
    """Detect a position, common to all sequences, from which on or up to which the mismatch is larger. A larger
    mismatch from a position on points to the cache or the rotary embedding."""
    levels = Levels.of(data)
    if levels is None:
        return []
    y, seq, position = levels.y, levels.seq, levels.position
    coordinates = {"response": position}
    if data.sample.prompt_lengths.any():
        coordinates["prompt_and_response"] = position + data.sample.prompt_lengths[seq]
    common = {name: best_cut(y, where, MIN_SIDE_TOKENS) for name, where in coordinates.items()}
    name = max(common, key=lambda each: common[each].explained)
    cut, where = common[name], coordinates[name]
    after = where >= cut.place
    if (
        _holds(cut, float(y @ y), len(y))
        and min(len(np.unique(where[after])), len(np.unique(where[~after]))) >= MIN_SIDE_POSITIONS
        and steepness(y, where, cut) >= MIN_STEEPNESS
        and _within_sequences(y, seq, after, cut) >= MIN_STEEPNESS
        and _low_part(data, levels.there, after, cut) <= allowed_noise(precisions(data))
    ):
        return [_onset(data, name, cut, levels.there, after)]
    return []


def find_own_places(data: PairData) -> list[Finding]:
    """Detect that the mismatch changes at a position that differs by sequence: weights changed during sampling."""
    levels = Levels.of(data)
    if levels is None:
        return []
    cuts, score = own_cuts(_detrended(levels.y, levels.position), levels.seq, levels.position)
    if len(cuts) < MIN_PLACE_SEQUENCES or score < MIN_OWN_SCORE:
        return []
    changes = [each.change for each in cuts.values()]
    change = float(np.average(changes, weights=[each.explained for each in cuts.values()]))
    if abs(change) < np.log(MIN_LEVEL_RATIO):
        return []
    return [_inside(data, cuts, change, levels.there, levels.seq, levels.position)]


def best_cut(y: np.ndarray, where: np.ndarray, margin: int, sign: int = 0) -> LevelChange:
    """Return the change of level in `y`, [N], along the coordinate `where`, [N], that explains most of the variance,
    with at least `margin` values before and after it.

    `sign` restricts the search to a rise (1) or a drop (-1).
    """
    order = np.argsort(where, kind="stable")
    y, where = y[order], where[order]
    num = len(y)
    before = np.arange(1, num)
    sums = np.cumsum(y)[:-1]
    means = sums / before, (y.sum() - sums) / (num - before)
    explained = before * means[0] ** 2 + (num - before) * means[1] ** 2 - num * y.mean() ** 2
    allowed = (where[1:] != where[:-1]) & (before >= margin) & (num - before >= margin)
    if sign:
        allowed &= sign * (means[1] - means[0]) > 0
    if not allowed.any():
        return LevelChange(int(where[0]) if num else 0, 0.0, 0.0)
    at = int(np.argmax(np.where(allowed, explained, -np.inf)))
    return LevelChange(int(where[at + 1]), float(means[1][at] - means[0][at]), float(explained[at]))


def steepness(y: np.ndarray, where: np.ndarray, cut: LevelChange) -> float:
    """Return the share of a change that occurs right at its position: 1 for a jump, near 0 for a slope."""
    low, high = where[where < cut.place], where[where >= cut.place]
    near_low = (where < cut.place) & (where >= np.quantile(low, 0.7))
    near_high = (where >= cut.place) & (where <= np.quantile(high, 0.3))
    if min(near_low.sum(), near_high.sum()) < 5:
        return 0.0
    return float((y[near_high].mean() - y[near_low].mean()) / cut.change)


def _holds(cut: LevelChange, total: float, num: int) -> bool:
    score = np.sqrt(cut.explained / max((total - cut.explained) / num, 1e-30))
    return bool(abs(cut.change) >= np.log(MIN_LEVEL_RATIO) and score >= MIN_PLACE_SCORE)


def _detrended(y: np.ndarray, position: np.ndarray) -> np.ndarray:
    """Subtract the mean per position bin, so that a trend common to all sequences is not mistaken for a change in each
    of them."""
    bins = np.digitize(position, np.unique(np.quantile(position, np.linspace(0, 1, 13)[1:-1])))
    count = np.bincount(bins)
    usual = np.bincount(bins, y) / np.maximum(count, 1)
    return np.asarray(y - usual[bins])


def own_cuts(y: np.ndarray, seq: np.ndarray, position: np.ndarray) -> tuple[dict[int, LevelChange], float]:
    """Return the best change in each sequence, all rises or all drops, and how much more the chosen direction explains
    than the opposite one, in standard errors. For randomly ordered values, both directions explain equally much.
    """
    order = np.lexsort((position, seq))
    parts = np.split(order, np.flatnonzero(np.diff(seq[order])) + 1)
    ups: dict[int, LevelChange] = {}
    downs: dict[int, LevelChange] = {}
    for part in parts:
        if len(part) >= MIN_CUT_TOKENS:
            row = int(seq[part[0]])
            ups[row] = best_cut(y[part], position[part], 3, sign=1)
            downs[row] = best_cut(y[part], position[part], 3, sign=-1)
    if len(ups) < MIN_PLACE_SEQUENCES:
        return {}, 0.0
    more = np.array([ups[row].explained - downs[row].explained for row in ups])
    score = float(more.sum() / max(np.sqrt(np.sum(more**2)), 1e-30))
    chosen, other = (ups, downs) if score > 0 else (downs, ups)
    return {row: cut for row, cut in chosen.items() if cut.explained > 2 * other[row].explained}, abs(score)


def _within_sequences(y: np.ndarray, seq: np.ndarray, after: np.ndarray, cut: LevelChange) -> float:
    """Return the share of a change that also appears within sequences that span its position, rather than only between
    long and short sequences."""
    num = [np.bincount(seq[part], minlength=int(seq.max()) + 1) for part in (~after, after)]
    spanning = (num[0] >= 3) & (num[1] >= 3)
    if spanning.sum() < 2:
        return 0.0
    means = [
        np.bincount(seq[part], y[part], minlength=len(num[0])) / np.maximum(n, 1)
        for part, n in zip((~after, after), num, strict=True)
    ]
    weight = np.minimum(*num)[spanning]
    return float(np.average((means[1] - means[0])[spanning], weights=weight) / cut.change)


def _low_part(data: PairData, there: np.ndarray, after: np.ndarray, cut: LevelChange) -> float:
    """Return the median logit noise, nats, in the part with the smaller mismatch: before a rise, or after a drop."""
    return float(np.median(data.noise[there][~after if cut.change > 0 else after]))


def _onset(data: PairData, name: str, cut: LevelChange, there: np.ndarray, after: np.ndarray) -> Finding:
    affected = np.zeros(data.num_kept, bool)
    affected[np.flatnonzero(there)[after if cut.change > 0 else ~after]] = True
    return data.finding(
        "position_onset" if cut.change > 0 else "change_inside_sequence",
        "common_place",
        affected,
        weight=data.explained_by(affected),
        next=commands.query(data, "by-position"),
        numbers={
            "position": cut.place,
            "counted": name,
            "larger": "from" if cut.change > 0 else "before",
            "ratio": float(np.exp(abs(cut.change))),
            "rms_elsewhere": data.rms(~affected),
        },
    )


def _inside(
    data: PairData,
    cuts: dict[int, LevelChange],
    change: float,
    there: np.ndarray,
    seq: np.ndarray,
    position: np.ndarray,
) -> Finding:
    place = np.full(data.sample.num_sequences, np.iinfo(np.int64).max)
    for row, cut in cuts.items():
        place[row] = cut.place
    after = position >= place[seq]
    chosen = after if change > 0 else ~after & np.isin(seq, list(cuts))
    affected = np.zeros(data.num_kept, bool)
    affected[np.flatnonzero(there)[chosen]] = True
    places = [cut.place for cut in cuts.values()]
    return data.finding(
        "change_inside_sequence",
        "own_places",
        affected,
        weight=data.explained_by(affected),
        next=commands.row(data, next(iter(cuts))),
        numbers={
            "num_sequences": len(cuts),
            "of_sequences": data.sample.num_sequences,
            "first_place": min(places),
            "last_place": max(places),
            "larger": "from" if change > 0 else "before",
            "ratio": float(np.exp(abs(change))),
        },
    )
