"""Reading the batches of verl's RayPPOTrainer: padded tensors on the driver.

Shapes: B rows, P padded prompt width, T padded response width.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from ..staging import to_numpy
from .verl_batches import Row
from .verl_forwards import FORWARD_KEYS, ROW_KEY
from .verl_worker import UPDATE_KEY

_OF_PROMPT = ("prompts",)
_NAMES = {"rm_scores": "token_level_scores", "entropy": "entropys"}
"""Column of the trainer of today -> of this one."""


def rows_of_padded(batch: Any, sampled_by: int | None) -> list[Row]:
    """The rows of a DataProto; keys are `<uid>_<sample>_0`, samples of a prompt counted as they lie.

    `sampled_by` is the number of the transfer that gave the weights which sampled them all, where that is known; elsewhere
    each row has its own, where verl says so.
    """
    seen: Counter[str] = Counter()
    rows = []
    oldest, newest = (batch.non_tensor_batch.get(f"{which}_global_steps") for which in ("min", "max"))
    for index, uid in enumerate(map(str, batch.non_tensor_batch["uid"])):
        rows.append(
            Row(
                index=index,
                key=f"{uid}_{seen[uid]}_0",
                oldest_weights=sampled_by if sampled_by is not None or oldest is None else oldest[index],
                newest_weights=sampled_by if sampled_by is not None or newest is None else newest[index],
            )
        )
        seen[uid] += 1
    return rows


def padded_column(batch: Any, name: str) -> list[np.ndarray] | None:
    """One array a row of a column of [B, P] or [B, T], without its padding; None where there is no such column."""
    name = _NAMES.get(name, name)
    if name not in batch.batch.keys():  # noqa: SIM118 - `in` of a TensorDict looks elsewhere
        return None
    if name in FORWARD_KEYS.values():
        return list(to_numpy(batch.batch[name]))
    values, attention_BW = to_numpy(batch.batch[name]), to_numpy(batch.batch["attention_mask"]).astype(bool)
    width = batch.batch["prompts"].shape[1]
    kept = attention_BW[:, :width] if name in _OF_PROMPT else attention_BW[:, width:]
    return [row[mask] for row, mask in zip(values, kept, strict=True)]


def ride_along(batch: Any, told: dict[str, Any]) -> None:
    """Let the workers that get parts of this batch know the update, and which rows they got."""
    import torch

    batch.meta_info[UPDATE_KEY] = told
    batch.batch[ROW_KEY] = torch.arange(len(told["keys"]))


def get_off(batch: Any) -> None:
    """Take from the batch what rode along."""
    batch.meta_info.pop(UPDATE_KEY, None)
    for name in (ROW_KEY, *FORWARD_KEYS.values()):
        batch.batch.pop(name, None)
