"""Reading the batches of verl's trainer, whose rows lie in its TransferQueue.

Shapes: B rows, T response tokens of a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..staging import to_numpy

SCORED = (
    "prompts", "responses", "response_mask", "rm_scores", "rollout_log_probs", "old_log_probs", "ref_log_prob", "entropy",
)  # fmt: skip
"""Columns that are there before the advantages; the mask is that before verl's rejection takes tokens out of it."""
ESTIMATED = ("advantages",)
"""Columns that are there once the advantages are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of a batch by its key: `<uid>_<sample>_<output>`."""

    index: int
    """Its place in verl's batch."""
    key: str
    oldest_weights: int | None
    """Global step of the oldest weights that sampled a part of it; None where verl does not say."""
    newest_weights: int | None

    @property
    def group_id(self) -> str:
        """verl's uid of the prompt."""
        uid, *rest = self.key.rsplit("_", 2)
        return uid if len(rest) == 2 else self.key


def rows_of(batch: Any) -> list[Row]:
    """The rows of a KVBatchMeta, without those that verl made up to fill it."""
    return [
        Row(
            index=index, key=key, oldest_weights=tag.get("min_global_steps"), newest_weights=tag.get("max_global_steps")
        )
        for index, (key, tag) in enumerate(zip(batch.keys, batch.tags, strict=True))
        if not tag.get("is_padding", False)
    ]


def fetch(batch: Any, columns: Sequence[str]) -> Any:
    """The columns of a batch, those of them that are there."""
    import transfer_queue

    return transfer_queue.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=list(columns))


def column(data: Mapping[str, Any], name: str, rows: Sequence[Row]) -> list[np.ndarray] | None:
    """One array a row of a nested or padded tensor; None where there is no such column."""
    if name not in data.keys():  # noqa: SIM118 - `in` of a TensorDict looks elsewhere
        return None
    parts = data[name].unbind()
    return [to_numpy(parts[row.index]) for row in rows]


def one_a_row(values: Sequence[np.ndarray], masks: Sequence[np.ndarray]) -> np.ndarray | None:
    """[B] what the tokens of each row that count have in common; None where they differ. 0.0 where none counts."""
    first = np.zeros(len(values), np.float32)
    for row, (value, mask) in enumerate(zip(values, masks, strict=True)):
        counted = value[mask.astype(bool)]
        if len(counted) and not np.all(counted == counted[0]):
            return None
        first[row] = counted[0] if len(counted) else 0.0
    return first


def finish_reasons(responses: Sequence[np.ndarray], end_ids: Sequence[int], most: int) -> list[str | None]:
    """[B] `stop` after an end token, `length` at the limit, None elsewhere: verl keeps no reason."""
    ends = {*end_ids}
    return [
        "stop" if len(ids) and int(ids[-1]) in ends else "length" if len(ids) >= most else None for ids in responses
    ]


def sums(values: Sequence[np.ndarray] | None) -> np.ndarray | None:
    """[B] the sum of each row."""
    return None if values is None else np.array([float(row.sum()) for row in values])


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted names; a list is kept as text."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found
