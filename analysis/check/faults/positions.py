"""A mismatch that changes within sequences, at a common position or at one that differs by sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import commands
from ..finding import Fault, Finding
from ..hypothesis import Hypothesis, located
from ..likelihood import explained
from ..pair_data import PairData
from ..rounding import allowed_noise
from ..structure import error_structure, fades, grows_inside
from ..where import Where
from .weights import measured

_RMS = "(rms {effect:.2g} vs {rms_elsewhere:.2g} nats)"
_COUNTED = {"position": "the response", "total_position": "prompt and response"}


def _onset(numbers: Mapping[str, Any]) -> dict[str, str]:
    counted = "the response" if numbers["counted"] == "response" else "prompt and response"
    return {"counted_text": counted, "on": " on" if numbers["larger"] == "from" else ""}


def _fall(numbers: Mapping[str, Any]) -> dict[str, str]:
    """Return a phrase that says whether the trend of the mismatch along sequences points to a cache or to weights."""
    times = f"{1 / max(numbers['fall'], 1e-9):.2g} times that in the first ({abs(numbers['fall_score']):.1f} standard errors)"
    if numbers["fall"] > MIN_FALL and numbers["fall_score"] > 4:
        return {"fall_text": f"{times}: the engine reused a prefix cache computed with older weights"}
    return {
        "fall_text": f"{times}: it does not fade along the sequence as a cached prompt would, so different weights are also "
        "possible; replay to find out"
    }


_EVIDENCE = {
    "common_place": "{larger} token {position} of {counted_text}{on}, in all sequences, the mismatch is {ratio:.3g} times "
    f"as large {_RMS}",
    "own_places": "in {num_sequences:,} of {of_sequences:,} sequences the mismatch is {ratio:.3g} times as large {after} a "
    "position that differs by sequence (token {first_place} to {last_place}): weights or the KV cache changed during "
    "sampling",
    "prefix_cache": "the {num_sequences:,} sequences whose prompt occurred at an earlier step have {ratio:.3g} times the "
    f"mismatch of the others {_RMS}; in the last third of a sequence it is {{fall_text}}",
    "persistence": "the logits differ by {level:.2g} nats rms; |d| is similar at neighbouring tokens (correlation "
    "{persistence:.2f}) but differs between sequences ({sequence_score:.0f} standard deviations): weights or cached "
    "prefixes changed during sampling",
}
_WORDS = {
    "common_place": _onset,
    "own_places": lambda n: {"after": "after" if n["larger"] == "from" else "before"},
    "prefix_cache": _fall,
}

ONSET = Fault(
    code="position_onset",
    title="the mismatch begins at one position of all sequences (KV cache or rotary embedding)",
    broken="computation", evidence=_EVIDENCE, words=_WORDS,
)  # fmt: skip
CHANGE = Fault(
    code="change_inside_sequence", title="weights or prefix cache changed during a sequence",
    broken="engine", evidence=_EVIDENCE, words=_WORDS,
    causes={"unknown": "the mismatch differs between sequences and lasts for several tokens: changed weights, a cache, or a context "
            "that is not recorded"},
)  # fmt: skip
MIN_FALL = 1.5
"""Minimum factor by which the mismatch drops from the first third of a sequence to the last if a cached prompt causes it."""


def find_onset(data: PairData, places: Sequence[Where]) -> list[Hypothesis]:
    """Detect a position, common to all sequences, after which or up to which the mismatch is larger. A larger mismatch
    from a position on points to the cache or the rotary embedding."""
    found = []
    for place in places:
        if place.feature not in _COUNTED or place.kind == "one_of" or place.values[0] < 2:
            continue
        if place.kind == "before" and grows_inside(data, place.inside) < 2.5:
            continue  # a mismatch at full size from the first step on is not due to changed weights
        fault = ONSET if place.kind == "from" else CHANGE
        finding = fault.finding(
            data, "common_place", place.inside, weight=explained(data, place.inside), next=commands.query(data, "by-position"),
            numbers={
                "position": int(place.values[0]),
                "counted": "response" if place.feature == "position" else "prompt_and_response",
                "larger": place.kind, "ratio": place.ratio, "rms_elsewhere": data.rms(~place.inside),
            },
        )  # fmt: skip
        found.append(located(data, finding, place.inside, np.log(place.values[0] + 2)))
    return found


def find_prefix_cache(data: PairData, places: Sequence[Where]) -> list[Hypothesis]:
    """Detect that sequences whose prompt occurred at an earlier step have the mismatch, unless older weights are declared
    for them."""
    found = []
    for place in places:
        rows = np.unique(data.seq[place.inside])
        if place.feature != "prompt_seen_before" or float((data.updates_behind[rows] != 0).mean()) > 0.95:
            continue
        fall, score = fades(data, place.inside)
        if _is_since_a_step(data, rows) and not (np.exp(fall) > MIN_FALL and score > 4):
            continue  # repeats from a step on, and no fading: it is the step, not the prompt
        finding = CHANGE.finding(
            data, "prefix_cache", place.inside, weight=explained(data, place.inside), next=commands.query(data, "by-prompt"),
            numbers={
                "column": place.feature, "ratio": place.ratio, "num_sequences": len(rows),
                "rms_elsewhere": data.rms(~place.inside), "fall": float(np.exp(fall)), "fall_score": score,
            },
        )  # fmt: skip
        found.append(located(data, finding, place.inside, 1.0))
    return found


def _is_since_a_step(data: PairData, rows: np.ndarray) -> bool:
    """Return True if the sequences `rows` are all those from one step on."""
    steps = data.sample.steps
    present = np.unique(data.seq)
    return bool(np.array_equal(np.sort(rows), present[steps[present] >= steps[rows].min()]))


@dataclass(frozen=True, slots=True)
class LevelChange:
    """A change point between two levels."""

    place: int
    """First position after the change."""
    change: float
    """Mean after the change minus mean before it."""
    explained: float
    """Sum of squares explained by the change, i.e. between the parts before and after it."""


@dataclass(frozen=True, slots=True)
class Levels:
    """Centred level, sequence and position, each [L], for the L kept tokens with a finite level."""

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
        if there.sum() < 4 * 20:
            return None
        y = level[there]
        return cls(y - y.mean(), data.seq[there], data.position[there], there)


def find_own_places(data: PairData) -> list[Hypothesis]:
    """Detect that the mismatch changes at a position that differs by sequence: weights changed during sampling."""
    levels = Levels.of(data)
    if levels is None:
        return []
    cuts, score = own_cuts(_detrended(levels.y, levels.position), levels.seq, levels.position)
    if len(cuts) < 4 or score < 6:
        return []
    changes = [each.change for each in cuts.values()]
    change = float(np.average(changes, weights=[each.explained for each in cuts.values()]))
    if abs(change) < np.log(3.0):
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
        if len(part) >= 8:
            row = int(seq[part[0]])
            ups[row] = best_cut(y[part], position[part], 3, sign=1)
            downs[row] = best_cut(y[part], position[part], 3, sign=-1)
    if len(ups) < 4:
        return {}, 0.0
    more = np.array([ups[row].explained - downs[row].explained for row in ups])
    score = float(more.sum() / max(np.sqrt(np.sum(more**2)), 1e-30))
    chosen, other = (ups, downs) if score > 0 else (downs, ups)
    return {row: cut for row, cut in chosen.items() if cut.explained > 2 * other[row].explained}, abs(score)


def _inside(
    data: PairData,
    cuts: dict[int, LevelChange],
    change: float,
    there: np.ndarray,
    seq: np.ndarray,
    position: np.ndarray,
) -> Hypothesis:
    place = np.full(data.sample.num_sequences, np.iinfo(np.int64).max)
    for row, cut in cuts.items():
        place[row] = cut.place
    after = position >= place[seq]
    chosen = after if change > 0 else ~after & np.isin(seq, list(cuts))
    affected = np.zeros(data.num_kept, bool)
    affected[np.flatnonzero(there)[chosen]] = True
    places = [cut.place for cut in cuts.values()]
    finding = CHANGE.finding(
        data,
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
    return located(data, finding, affected, len(cuts) * np.log(max(int(position.max()), 2)))


def find_persistence(data: PairData) -> list[Finding]:
    """Detect a mismatch that is similar in neighbouring tokens but differs between the sequences of a step."""
    structure = error_structure(data)
    # If all tokens are off, any error varies with the context; if many are right, the error comes and goes.
    if not structure.changes_inside(is_excessive=True) or float(np.nanmedian(data.noise)) > allowed_noise(data):
        return []
    numbers = measured(data) | {
        "cause": "unknown",
        "persistence": structure.persistence,
        "sequence_score": structure.sequence_score,
    }
    return [CHANGE.finding(data, "persistence", weight=0.5, next=commands.weights(data), numbers=numbers)]
