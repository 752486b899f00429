"""Places inside of sequences from which on the gap is another one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .. import commands
from ..evidence import Evidence
from ..finding import Finding
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
class Cut:
    """A place that divides values into two levels."""

    place: int
    """First coordinate of the second part."""
    change: float
    """Mean after it less mean before it."""
    explained: float
    """Sum of squares between the two parts."""


@dataclass(frozen=True, slots=True)
class Levels:
    """[L] the tokens that show a level: that level about its mean, their sequence and position."""

    y: np.ndarray
    seq: np.ndarray
    position: np.ndarray
    there: np.ndarray
    """[K] bool: which of the kept tokens they are."""

    @classmethod
    def of(cls, evidence: Evidence) -> Levels | None:
        """None where there are too few to divide."""
        level = evidence.level_beyond_tokens
        there = np.isfinite(level)
        if there.sum() < 4 * MIN_SIDE_TOKENS:
            return None
        y = level[there]
        return cls(y - y.mean(), evidence.seq[there], evidence.position[there], there)


def find_onset(evidence: Evidence) -> list[Finding]:
    """One position for all sequences, from which on (cache, rotary embedding) or up to which the gap is another one."""
    levels = Levels.of(evidence)
    if levels is None:
        return []
    y, seq, position = levels.y, levels.seq, levels.position
    coordinates = {"of the response": position}
    if evidence.sample.prompt_lengths.any():
        coordinates["of prompt and response"] = position + evidence.sample.prompt_lengths[seq]
    common = {name: best_cut(y, where, MIN_SIDE_TOKENS) for name, where in coordinates.items()}
    name = max(common, key=lambda each: common[each].explained)
    cut, where = common[name], coordinates[name]
    after = where >= cut.place
    if (
        _holds(cut, float(y @ y), len(y))
        and min(len(np.unique(where[after])), len(np.unique(where[~after]))) >= MIN_SIDE_POSITIONS
        and steepness(y, where, cut) >= MIN_STEEPNESS
        and _within_sequences(y, seq, after, cut) >= MIN_STEEPNESS
        and _low_part(evidence, levels.there, after, cut) <= allowed_noise(precisions(evidence))
    ):
        return [_onset(evidence, name, cut, levels.there, after)]
    return []


def find_own_places(evidence: Evidence) -> list[Finding]:
    """A place in each sequence where the gap becomes another one: weights that changed on the way."""
    levels = Levels.of(evidence)
    if levels is None:
        return []
    cuts, score = own_cuts(_detrended(levels.y, levels.position), levels.seq, levels.position)
    if len(cuts) < MIN_PLACE_SEQUENCES or score < MIN_OWN_SCORE:
        return []
    changes = [each.change for each in cuts.values()]
    change = float(np.average(changes, weights=[each.explained for each in cuts.values()]))
    if abs(change) < np.log(MIN_LEVEL_RATIO):
        return []
    return [_inside(evidence, cuts, change, levels.there, levels.seq, levels.position)]


def best_cut(y: np.ndarray, where: np.ndarray, margin: int, sign: int = 0) -> Cut:
    """The cut of values y, [N], at a coordinate, [N], that explains most; `margin` values at least lie on either side.

    `sign` asks for a rise (1) or a fall (-1).
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
        return Cut(int(where[0]) if num else 0, 0.0, 0.0)
    at = int(np.argmax(np.where(allowed, explained, -np.inf)))
    return Cut(int(where[at + 1]), float(means[1][at] - means[0][at]), float(explained[at]))


def steepness(y: np.ndarray, where: np.ndarray, cut: Cut) -> float:
    """Share of a cut's change that happens next to it: 1 for a step, little for a slope."""
    low, high = where[where < cut.place], where[where >= cut.place]
    near_low = (where < cut.place) & (where >= np.quantile(low, 0.7))
    near_high = (where >= cut.place) & (where <= np.quantile(high, 0.3))
    if min(near_low.sum(), near_high.sum()) < 5:
        return 0.0
    return float((y[near_high].mean() - y[near_low].mean()) / cut.change)


def _holds(cut: Cut, total: float, num: int) -> bool:
    score = np.sqrt(cut.explained / max((total - cut.explained) / num, 1e-30))
    return bool(abs(cut.change) >= np.log(MIN_LEVEL_RATIO) and score >= MIN_PLACE_SCORE)


def _detrended(y: np.ndarray, position: np.ndarray) -> np.ndarray:
    """Values less what is usual at their position, so that what all sequences have in common is no place of their own."""
    bins = np.digitize(position, np.unique(np.quantile(position, np.linspace(0, 1, 13)[1:-1])))
    count = np.bincount(bins)
    usual = np.bincount(bins, y) / np.maximum(count, 1)
    return np.asarray(y - usual[bins])


def own_cuts(y: np.ndarray, seq: np.ndarray, position: np.ndarray) -> tuple[dict[int, Cut], float]:
    """The best cut of each sequence in the direction that they share, and by how many standard errors that direction
    explains more than the other one does: of values in any order both explain the same.
    """
    order = np.lexsort((position, seq))
    parts = np.split(order, np.flatnonzero(np.diff(seq[order])) + 1)
    ups: dict[int, Cut] = {}
    downs: dict[int, Cut] = {}
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


def _within_sequences(y: np.ndarray, seq: np.ndarray, after: np.ndarray, cut: Cut) -> float:
    """Share of a cut's change that is there within the sequences that reach over it, and not between long and short ones."""
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


def _low_part(evidence: Evidence, there: np.ndarray, after: np.ndarray, cut: Cut) -> float:
    """Median noise of the part with the smaller gap, nats of a logit."""
    return float(np.median(evidence.noise[there][~after if cut.change > 0 else after]))


def _onset(evidence: Evidence, name: str, cut: Cut, there: np.ndarray, after: np.ndarray) -> Finding:
    affected = np.zeros(evidence.num_kept, bool)
    affected[np.flatnonzero(there)[after if cut.change > 0 else ~after]] = True
    ratio = float(np.exp(abs(cut.change)))
    side = f"from token {cut.place} {name} on" if cut.change > 0 else f"before token {cut.place} {name}"
    return Finding(
        code="position_onset" if cut.change > 0 else "change_inside_sequence",
        evidence=f"{side}, in all sequences alike, the gap is {ratio:.3g} times as large "
        f"(rms {evidence.rms(affected):.2g} against {evidence.rms(~affected):.2g} nats)",
        effect=evidence.rms(affected),
        share=float(affected.mean()),
        weight=evidence.explained_by(affected),
        next=commands.query(evidence, "by-position"),
        numbers={"position": cut.place, "counted": name, "ratio": ratio},
    )


def _inside(
    evidence: Evidence,
    cuts: dict[int, Cut],
    change: float,
    there: np.ndarray,
    seq: np.ndarray,
    position: np.ndarray,
) -> Finding:
    place = np.full(evidence.sample.num_sequences, np.iinfo(np.int64).max)
    for row, cut in cuts.items():
        place[row] = cut.place
    after = position >= place[seq]
    chosen = after if change > 0 else ~after & np.isin(seq, list(cuts))
    affected = np.zeros(evidence.num_kept, bool)
    affected[np.flatnonzero(there)[chosen]] = True
    places = [cut.place for cut in cuts.values()]
    ratio = float(np.exp(abs(change)))
    return Finding(
        code="change_inside_sequence",
        evidence=f"in {len(cuts):,} of {evidence.sample.num_sequences:,} sequences the gap is {ratio:.3g} times as large "
        f"{'after' if change > 0 else 'before'} a place of their own (token {min(places)} to {max(places)}): weights or "
        "cached keys and values were exchanged while these were being sampled",
        effect=evidence.rms(affected),
        share=float(affected.mean()),
        weight=evidence.explained_by(affected),
        next=commands.row(evidence, next(iter(cuts))),
        numbers={"num_sequences": len(cuts), "first_place": min(places), "last_place": max(places), "ratio": ratio},
    )
