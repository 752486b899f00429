"""Read verl's batches, from the TransferQueue or padded tensors.

Shapes: B rows, P padded prompt width, T response tokens or padded response width.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from ...schemas.passes import REFERENCE, TRAIN
from ..rows import Forward
from ..staging import to_numpy
from .verl_contract import FSDP

SCORED = (
    "prompts", "responses", "response_mask", "rm_scores", "rollout_log_probs", "old_log_probs", "ref_log_prob", "entropy",
)  # fmt: skip
"""Columns read before verl computes advantages, because rejection sampling in that step shrinks the response mask."""
ESTIMATED = ("advantages",)
_NAMES = {"rm_scores": "token_level_scores", "entropy": "entropys"}

UPDATE_KEY = "tim_trace_update"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A batch row. Its key has the form `<uid>_<sample>_<output>`."""

    index: int
    key: str
    oldest_weights: int | None
    """Global step of the oldest weights used to sample the row, or None if unknown."""

    @property
    def group_id(self) -> str:
        uid, *rest = self.key.rsplit("_", 2)
        return uid if len(rest) == 2 else self.key


def rows_of(batch: Any) -> list[Row]:
    return [
        Row(index=index, key=key, oldest_weights=tag.get("min_global_steps"))
        for index, (key, tag) in enumerate(zip(batch.keys, batch.tags, strict=True))
        if not tag.get("is_padding", False)
    ]


def fetch(batch: Any, columns: Sequence[str]) -> Any:
    import transfer_queue

    return transfer_queue.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=list(columns))


def column(data: Mapping[str, Any], name: str, rows: Sequence[Row]) -> list[np.ndarray] | None:
    if name not in data.keys():  # noqa: SIM118 - TensorDict supports `in` only on keys()
        return None
    parts = data[name].unbind()
    return [to_numpy(parts[row.index]) for row in rows]


def one_a_row(values: Sequence[np.ndarray], masks: Sequence[np.ndarray]) -> np.ndarray | None:
    """Return one value per row [B], 0.0 if fully masked, or None if a row's unmasked tokens have different values."""
    first = np.zeros(len(values), np.float32)
    for row, (value, mask) in enumerate(zip(values, masks, strict=True)):
        counted = value[mask.astype(bool)]
        if len(counted) and not np.all(counted == counted[0]):
            return None
        first[row] = counted[0] if len(counted) else 0.0
    return first


def finish_reasons(responses: Sequence[np.ndarray], end_ids: Sequence[int], most: int) -> list[str | None]:
    """Infer finish reasons [B]: `stop` for a final end token, `length` for at least `most` tokens, otherwise None."""
    return [
        "stop" if len(ids) and int(ids[-1]) in end_ids else "length" if len(ids) >= most else None for ids in responses
    ]


def sums(values: Sequence[np.ndarray] | None) -> np.ndarray | None:
    return None if values is None else np.array([float(row.sum()) for row in values])


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def rows_of_padded(batch: Any, sampled_by: int | None) -> list[Row]:
    """Return a DataProto's rows, with keys of the form `<uid>_<sample>_0`.

    `sampled_by` is the number of the last weight transfer before sampling, or None to read it from the batch.
    """
    seen: Counter[str] = Counter()
    rows = []
    oldest = batch.non_tensor_batch.get("min_global_steps")
    for index, uid in enumerate(map(str, batch.non_tensor_batch["uid"])):
        oldest_weights = sampled_by if sampled_by is not None or oldest is None else oldest[index]
        rows.append(Row(index=index, key=f"{uid}_{seen[uid]}_0", oldest_weights=oldest_weights))
        seen[uid] += 1
    return rows


def padded_column(batch: Any, name: str) -> list[np.ndarray] | None:
    name = _NAMES.get(name, name)
    if name not in batch.batch.keys():  # noqa: SIM118 - TensorDict supports `in` only on keys()
        return None
    if name in FORWARD_KEYS.values():
        return list(to_numpy(batch.batch[name]))
    values, attention_BW = to_numpy(batch.batch[name]), to_numpy(batch.batch["attention_mask"]).astype(bool)
    width = batch.batch["prompts"].shape[1]
    kept = attention_BW[:, :width] if name == "prompts" else attention_BW[:, width:]
    return [row[mask] for row, mask in zip(values, kept, strict=True)]


def ride_along(batch: Any, told: dict[str, Any]) -> None:
    """Attach row numbers and the update's details (`told`) to a batch for the workers."""
    import torch

    batch.meta_info[UPDATE_KEY] = told
    batch.batch[ROW_KEY] = torch.arange(len(told["keys"]))


def get_off(batch: Any) -> None:
    batch.meta_info.pop(UPDATE_KEY, None)
    for name in (ROW_KEY, *FORWARD_KEYS.values()):
        batch.batch.pop(name, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    step: int
    version: int
    """Number of actor updates included in the trainer's weights."""
    old_version: int
    """Number of actor updates included in the weights used for `old_log_probs`."""
    updates_a_transfer: int
    """Number of actor updates per weight transfer."""
    transfers_ahead: int = 0
    is_last: bool

    def sampled_by(self, transfer: int | None) -> int | None:
        """Return the number of actor updates included in the weights sent by transfer number `transfer`."""
        return None if transfer is None else max(int(transfer) - self.transfers_ahead, 0) * self.updates_a_transfer


def progress_of(trainer: Any) -> Progress:
    if hasattr(trainer, "current_param_version"):
        return _fully_asynchronous(trainer)
    step = int(trainer.global_steps)
    updates, done = int(getattr(trainer, "parameter_sync_step", 1)), int(getattr(trainer, "local_trigger_step", 0))
    begin = (step - 1) * updates
    return Progress(
        step=step,
        version=begin + done,
        # The v1 trainer's separate_async mode computes `old_log_probs` with the weights from the start of the step.
        old_version=begin if hasattr(trainer, "standalone_checkpoint_manager") else begin + done,
        updates_a_transfer=updates,
        # OneStepOffRayTrainer increments its step counter before the transfer, so transfer numbers are one ahead.
        transfers_ahead=int(any(parent.__name__ == "OneStepOffRayTrainer" for parent in type(trainer).__mro__)),
        is_last=step >= int(trainer.total_training_steps) and done + 1 >= updates,
    )


def _fully_asynchronous(trainer: Any) -> Progress:
    """Like `progress_of`, but `global_steps` counts actor updates from 1, and logged steps count weight transfers."""
    updates, done = int(trainer.trigger_parameter_sync_step), int(trainer.global_steps) - 1
    transfers = int(trainer.current_param_version)
    most = trainer.total_train_steps
    return Progress(
        step=transfers + 1,
        version=done,
        old_version=transfers * updates,
        updates_a_transfer=updates,
        is_last=most is not None and done + 1 >= int(most) * updates,
    )


ROW_KEY = "tim_trace_row"
"""Batch key for row indices, used to identify rows in shuffled micro-batches."""
FORWARD_KEYS = {name: f"tim_trace_forward_{name}" for name in (TRAIN, REFERENCE)}
"""Maps a pass to the column in the workers' output that contains the result of `Forwards.column`."""


class Forwards:
    """Forward passes in one engine call.

    Stores four numbers per row: the id of its forward pass, its index in that pass, the number of rows in that pass,
    and the number of padding tokens after the row.
    """

    def __init__(self, engine: Any, numbers: Iterator[int]):
        self._engine = engine
        self._numbers = numbers
        self._of_row: dict[int, tuple[int, int, int, int]] = {}

    @staticmethod
    def are_known(engine: Any) -> bool:
        return getattr(getattr(engine, "engine_config", None), "strategy", None) in FSDP

    def add(self, micro_batches: Sequence[Any], *, is_packed: bool) -> None:
        # The driver merges rows from several processes, which all number their passes from 0. Include the rank to make
        # the numbers unique.
        rank, size = self._engine.get_data_parallel_rank(), self._engine.get_data_parallel_size()
        for part in micro_batches:
            rows = part[ROW_KEY].tolist()
            lengths = part["input_ids"].offsets().diff().tolist()
            padding = [max(lengths) - length for length in lengths]
            if is_packed:
                padding = [0] * (len(rows) - 1) + [self._tail(sum(lengths))]
            number = next(self._numbers) * size + rank
            for place, (row, after) in enumerate(zip(rows, padding, strict=True)):
                self._of_row[int(row)] = (number, place, len(rows), after)

    def _tail(self, num_tokens: int) -> int:
        engine, width = self._engine, num_tokens
        settings = engine.engine_config
        bucket = getattr(settings, "pad_to_length_bucket", 1) if getattr(engine, "pad_to_length", False) else 1
        for multiple in (bucket, getattr(settings, "ulysses_sequence_parallel_size", 1)):
            width = -(-width // multiple) * multiple
        return width - num_tokens

    def column(self, num_rows: int) -> Any:
        """Return the numbers stored for each row as [B, 4] int64, or None if any row has none."""
        import torch

        found = [self._of_row[row] for row in range(num_rows) if row in self._of_row]
        return torch.tensor(found, dtype=torch.int64) if len(found) == num_rows else None

    def of(self, rows: Sequence[int]) -> Forward | None:
        known = all(int(row) in self._of_row for row in rows)
        return forward_of([np.array(self._of_row[int(row)]) for row in rows]) if known else None


def attended_tokens(loss_mask: Any) -> dict[str, int]:
    """Return the setting `attended_tokens`, or an empty dict if attention sees all tokens.

    Before verl 0.8, attention sees only the first W tokens of a padded row, where W is the loss mask's width.
    """
    since_0_8 = "build_attention_mask_from_nested"
    is_all = loss_mask.is_nested or hasattr(import_module("verl.workers.utils.padding"), since_0_8)
    return {} if is_all else {"attended_tokens": loss_mask.shape[1]}


def forward_of(values: Sequence[np.ndarray] | None) -> Forward | None:
    if values is None or not len(values):
        return None
    ids, places, rows, after = np.stack(values).astype(np.int64).T
    return Forward(ids=ids, places=places, rows=rows, pad_left=np.zeros_like(after), pad_right=after)
