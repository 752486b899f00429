"""Values that belong to other tokens: blocks of a row in the wrong order, or rows from other steps and ranks.

Shapes: K kept tokens, W windows of WIDTH consecutive tokens of one sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .. import commands
from ..features import sampled_score
from ..finding import Fault
from ..likelihood import Hypothesis, predicting
from ..pair_data import PairData, once
from ..rounding import allowed_noise

_ORDERS = {
    "blocks": "blocks of the same row are in the wrong order, as when the chunks of a context-parallel row are joined "
    "wrongly: {num_offsets:,} displacements, most often {offset:+,} tokens",
    "rows": "they belong to other rows, {steps_text}",
}


def _where(numbers: Mapping[str, Any]) -> dict[str, str]:
    apart = numbers["steps_apart"]
    steps = (
        "of the same step" if not apart else f"of steps {apart:+d} away" if apart is not None else "of several steps"
    )
    return {"order_text": _ORDERS[numbers["order"]].format_map({**numbers, "steps_text": steps})}


MISPLACED = Fault(
    code="misplaced",
    title="one side's values belong to other tokens: blocks or rows are in the wrong order",
    broken="recording",
    evidence={
        "found_elsewhere": "{num_tokens:,} values of {side} match {other} at other tokens, within {residual:.2g} nats "
        "on average; as recorded they are off by {size:.2g}: {order_text}",
    },
    words={"found_elsewhere": _where},
)


def find_misplaced(data: PairData) -> list[Hypothesis]:
    """Detect runs of values in pass b that match pass a at other tokens, anywhere in the sample."""
    if data.num_kept < 100 or data.rms() < 0.05:
        return []
    place = placement(data)
    if place is None:
        return []
    moved = (place.source >= 0) & (place.source != np.arange(data.num_kept))
    if moved.sum() < 20:
        return []
    residual = np.where(moved, data.b - data.a[np.maximum(place.source, 0)], 0.0)
    finding = MISPLACED.finding(
        data, "found_elsewhere", moved, weight=float(np.sum(data.d[moved] ** 2) / max(np.sum(data.d**2), 1e-30)),
        next=commands.row(data, int(data.seq[np.flatnonzero(moved)[0]])),
        numbers={
            **_described(data, place, moved), "num_tokens": int(moved.sum()),
            "residual": float(np.mean(np.abs(residual[moved]))), "size": float(np.mean(np.abs(data.d[moved]))),
        },
    )  # fmt: skip
    cost = place.num_segments * np.log(max(data.num_kept, 2))
    # A shift or a pairing of rows says the same with fewer displacements.
    return [replace(predicting(data, finding, residual, cost, moved, is_right=True), rank=1)]


def _described(data: PairData, place: Placement, moved: np.ndarray) -> dict[str, Any]:
    # The side whose logprob + entropy averages to 0 has the values in the right place.
    a_is_right = abs(sampled_score(data, "a")) <= abs(sampled_score(data, "b")) or data.sample.b.entropy is None
    right, wrong = ("a", "b") if a_is_right else ("b", "a")
    if place.other_row[moved].mean() > 0.5:
        there = np.flatnonzero(moved & place.other_row)
        steps = data.sample.steps
        apart = steps[data.seq[place.source[there]]] - steps[data.seq[there]]
        values, counts = np.unique(apart, return_counts=True)
        most = int(values[np.argmax(counts)]) if counts.max() > 0.8 * len(apart) else None
        order: dict[str, Any] = {"order": "rows", "steps_apart": most, "offset": 0, "num_offsets": 0}
    else:
        values, counts = np.unique(place.offsets[moved], return_counts=True)
        order = {
            "order": "blocks", "steps_apart": 0, "offset": int(values[np.argmax(counts)]), "num_offsets": len(values),
        }  # fmt: skip
    return {"side": data.names[wrong], "other": data.names[right], **order}


WIDTH = 6
"""Number of consecutive tokens compared at once: fewer match by chance, more miss short blocks."""
MAX_WINDOWS = 4_000
"""Maximum number of misplaced windows searched."""
_CHANCE_SEED = 0


@dataclass(frozen=True, slots=True)
class Placement:
    """Tokens to which the values of pass b belong."""

    source: np.ndarray
    """[K] index of the kept token whose value in pass a matches this token's value in pass b; -1 if none was found."""
    num_segments: int
    """Number of runs of tokens with the same displacement."""
    offsets: np.ndarray
    """[K] displacement in tokens within the row; 0 if there is no source or it is in another row."""
    other_row: np.ndarray
    """[K] bool: True where the source is in another row."""


@once
def placement(data: PairData) -> Placement | None:
    """Search the whole sample for the tokens to which misplaced values belong; None if too few are found."""
    from scipy.spatial import cKDTree  # needed only if nothing simpler explains the mismatch

    start = _window_starts(data)
    if len(start) < 20:
        return None
    span = np.arange(WIDTH)
    windows_a, windows_b = data.a[start[:, None] + span], data.b[start[:, None] + span]
    own = np.mean(np.minimum(np.abs(windows_a - windows_b), 3.0), axis=1)
    tolerance = max(2 * allowed_noise(data) / 2, 0.02)
    informative = (np.std(windows_b, axis=1) > 10 * tolerance) & (own > 5 * tolerance)
    wanted = np.flatnonzero(informative)
    if len(wanted) < 10:
        return None
    wanted = wanted[:: -(-len(wanted) // MAX_WINDOWS)]
    tree = cKDTree(windows_a)
    distance, nearest = tree.query(windows_b[wanted], p=1)
    draw = np.random.default_rng(_CHANCE_SEED)
    mixed = draw.permuted(windows_b[wanted], axis=1)
    by_chance = tree.query(mixed, p=1)[0]
    limit = min(float(np.quantile(by_chance, 0.02)), WIDTH * own[wanted].mean() / 4)
    fits = distance < limit
    # The same text has similar values wherever it occurs.
    ids = data.sample.tokens[data.keep]
    one, two = start[wanted][:, None] + span, start[nearest][:, None] + span
    fits &= np.any(ids[one] != ids[two], axis=1) | (nearest == wanted)
    if fits.sum() < 10 or fits.mean() < 0.1 or fits.mean() < 4 * np.mean(by_chance < limit):
        return None
    return _extended(data, start[wanted[fits]], start[nearest[fits]])


def _window_starts(data: PairData) -> np.ndarray:
    """Return the index of each kept token that begins WIDTH consecutive kept tokens of its sequence."""
    at = np.arange(max(data.num_kept - WIDTH + 1, 0))
    last = at + WIDTH - 1
    same = (data.seq[at] == data.seq[last]) & (data.position[last] - data.position[at] == WIDTH - 1)
    return np.asarray(at[same])


def _extended(data: PairData, targets: np.ndarray, sources: np.ndarray) -> Placement:
    """Extend each match over its window, and further as long as the values match."""
    source = np.full(data.num_kept, -1)
    best = np.full(data.num_kept, np.inf)
    for shift in range(WIDTH):
        at, come = targets + shift, sources + shift
        cost = np.abs(data.b[at] - data.a[come])
        better = cost < best[at]
        source[at[better]], best[at[better]] = come[better], cost[better]
    moved = source - np.arange(data.num_kept)
    for step in (1, -1):  # fill gaps between and around the windows that were searched
        for _ in range(64):
            at = np.flatnonzero(source < 0)
            beside = at - step
            ok = (beside >= 0) & (beside < data.num_kept)
            at, beside = at[ok], beside[ok]
            ok = (source[beside] >= 0) & (data.seq[at] == data.seq[beside])
            at, beside = at[ok], beside[ok]
            come = source[beside] + step
            ok = (come >= 0) & (come < data.num_kept)
            at, beside, come = at[ok], beside[ok], come[ok]
            ok = data.seq[come] == data.seq[source[beside]]
            ok &= np.abs(data.b[at] - data.a[come]) < np.abs(data.d[at]) + 1e-12
            if not ok.any():
                break
            source[at[ok]] = come[ok]
    there = source >= 0
    other = np.zeros(data.num_kept, bool)
    other[there] = data.seq[source[there]] != data.seq[there]
    offsets = np.where(there & ~other, source - np.arange(data.num_kept), 0)
    moved = np.where(there, source - np.arange(data.num_kept), 0)
    change = np.concatenate([[True], (moved[1:] != moved[:-1]) | (data.seq[1:] != data.seq[:-1])])
    return Placement(source, int((change & (moved != 0)).sum()), offsets, other)
