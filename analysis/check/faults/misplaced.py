"""Values that belong to other tokens: blocks of a row in the wrong order, or rows from other steps and ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from .. import commands
from ..finding import Fault
from ..hypothesis import Hypothesis, predicting
from ..pair_data import PairData
from ..placement import Placement, placement
from ..structure import sampled_score

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
