"""Import pickled DataProto objects from verl, and text from rollout_data_dir.

Shapes: B sequences, P padded prompt length, T padded response length, L layers with a router, S experts per token.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pyarrow as pa

from ...schemas.errors import ImportFailed
from ..ragged import Padding
from .arrays import Shell, known, raw_tensor, settled
from .columns import RowBatch
from .dump_rows import added_columns, list_column, padded_columns, routed
from .fields import PER_TOKEN, Fields, shown
from .format import DumpFolder, Format, Part, Reading, first_object, read_rows
from .pickles import BYTES, Budget, Foreign, NotPlain
from .textfiles import opened
from .torch_files import read_bytes, tensors_in, unpickled

_SHELLS = known({"verl.protocol verl": {"DataProto DataProtoItem": Shell}})
_TEXT = r"(\d+)\.jsonl"
_BATCH = r"[^/]+\.(?:dp|pkl)"

COLUMNS = {
    "prompt_ids": ("prompts",),
    "response_ids": ("responses",),
    "attention_mask": ("attention_mask",),
    "response_mask": ("response_mask", "loss_mask"),
    "rollout_logprobs": ("rollout_log_probs",),
    "train_logprobs": ("old_log_probs",),
    "reference_logprobs": ("ref_log_prob", "ref_log_probs"),
    "entropy": ("entropys", "entropy"),
    "advantage": ("advantages",),
    "reward": ("token_level_scores", "rm_scores", "score"),
    "group_id": ("uid",),
    "temperature": ("temperature",),
    "step": ("global_steps", "step"),
    "rollout_expert_ids": ("routed_experts",),
}


def _parts(folder: DumpFolder) -> list[Part]:
    names = list(folder.matching(_BATCH))
    names = [name for name in names if name.endswith(".dp")] or names
    batches = [Part(files=(name,), step=_step_of(folder, name)) for name in names]
    texts = [Part(files=(name,), step=int(found[1])) for name, found in folder.matching(_TEXT).items()]
    if batches and texts:
        raise ImportFailed(
            f"{folder.url} contains both batches (*.dp) and text (*.jsonl) for the same sequences. Pass the batches, "
            f"e.g. tim-trace import verl {shlex.quote(str(folder.root / names[0]))} -o RUN"
        )
    return batches or texts


def _step_of(folder: DumpFolder, name: str) -> int | None:
    found = None
    if (meta := folder.beside(name, "meta.json")) is not None:
        with suppress(ValueError, AttributeError, RecursionError), opened(folder.path(meta)) as file:
            found = json.loads(file.read(65536)).get("global_steps")
    if type(found) is int and found >= 0:
        return found
    numbers = re.findall(r"(?:^|[_/])(\d+)(?=/|\.[a-z]+$)", name)
    return int(numbers[-1]) if numbers else None


def _recognises(folder: DumpFolder) -> bool:
    if any(name.endswith(".dp") for name in folder.files):
        return True
    text = folder.first(_TEXT)
    return text is not None and {"input", "output", "score"} <= first_object(folder, text).keys()


def _read(reading: Reading) -> Iterator[RowBatch]:
    if reading.part.files[0].endswith(".jsonl"):
        yield from read_rows(reading, _text_row)
        return
    ((path, content),) = reading.contents()
    record, meta = _batch(content, str(path), reading.budget)
    fields = reading.fields(record, str(path))
    settings = reading.fields(meta, str(path))
    step = settings.integer("step") if reading.part.step is None else reading.part.step
    if step is None:
        raise ImportFailed(f"{path} has no step. Move it to a folder named after its step, e.g. 7/{path.name}")
    yield _rows(fields, str(path), step, settings.number("temperature"))


def _batch(content: bytes, where: str, budget: Budget) -> tuple[dict[str, Any], dict[str, Any]]:
    found = unpickled(content, where, _SHELLS)
    state = found.state if isinstance(found, (Shell, Foreign)) else None
    try:
        if isinstance(state, dict):
            state = (state.get("batch"), state.get("non_tensor_batch"), state.get("meta_info"))
        if not (isinstance(state, tuple) and len(state) == 3):
            raise NotPlain("unexpected state")
        batch, others, meta = state
        if isinstance(batch, BYTES):
            batch = read_bytes(batch, where, _SHELLS, budget)
        tensors = _encoded(batch) if isinstance(batch, tuple) else tensors_in(batch or {})
        return {**tensors, **(others or {})}, dict(meta or {})
    except (ValueError, TypeError) as error:
        if isinstance(error, ImportFailed):
            raise
        raise ImportFailed(f"{where} is not a verl DataProto ({error})") from error


def _encoded(batch: tuple[Any, ...]) -> dict[str, Any]:
    if len(batch) != 3 or not isinstance(batch[2], dict):
        raise NotPlain("the tensors have an unexpected form")
    encoded = {name: value for name, value in batch[2].items() if isinstance(value, tuple) and len(value) == 3}
    foreign = {name: value for name, value in batch[2].items() if isinstance(value, Foreign)}
    return {name: raw_tensor(*value) for name, value in encoded.items()} | foreign


def _rows(fields: Fields, where: str, step: int, temperature: float | None) -> RowBatch:
    """Return a batch's rows. Prompts [B, P] are left-padded. Responses and their values [B, T] are right-padded."""
    responses, prompts = fields.array("response_ids", 2), fields.array("prompt_ids", 2)
    if responses is None:
        raise ImportFailed(f"{where} has no responses. Save the batch after generation")
    num_rows, width = responses.shape
    prompt_width = 0 if prompts is None else prompts.shape[1]
    attention = fields.array("attention_mask", 2)
    if attention is None or attention.shape != (num_rows, prompt_width + width):
        raise ImportFailed(
            f"{where}: attention_mask must have shape [{num_rows}, {prompt_width + width}] for prompts and responses"
        )
    is_token = attention.astype(bool)
    responded, prompted = Padding.of(is_token[:, prompt_width:]), Padding.of(is_token[:, :prompt_width])
    per_token = {
        name: values
        for name in ("response_mask", *PER_TOKEN, *fields.added_per_token)
        if (values := _aligned(fields, name, (num_rows, width), where)) is not None
    }
    columns = padded_columns(step, prompts, prompted, responses, responded, per_token)
    groups = settled(fields.get("group_id"))
    if groups is not None and len(groups) == num_rows:
        if odd := next((group for group in groups if isinstance(group, Foreign)), None):
            raise ImportFailed(f"{where}: uid contains {shown(odd)}. Leave it out with --map uid=")
        columns["group_id"] = [str(group) for group in groups]
    rewards = _rewards(fields, responded, where)
    if rewards is not None:
        columns["reward"] = pa.array(rewards)
    if temperature is not None:
        columns["temperature"] = [temperature] * num_rows
    columns |= added_columns(fields, num_rows, {*columns, "rollout_expert_ids"})
    if num_rows and (experts := _experts(fields, is_token.shape, where)) is not None:
        chosen = routed(experts[is_token], int(is_token.sum()), where)
        columns["rollout_expert_ids"] = list_column(chosen, is_token.sum(axis=1))
    return RowBatch(file=where, columns=columns, numbers=range(1, num_rows + 1))


def _array(fields: Fields, column: str, dimensions: int) -> np.ndarray | None:
    return fields.array(column, dimensions) if np.ndim(settled(fields.get(column))) == dimensions else None


def _rewards(fields: Fields, responded: Padding, where: str) -> np.ndarray | None:
    if (rewards := _array(fields, "reward", 2)) is None:
        return None
    if len(rewards) != len(responded.lengths) or rewards.shape[1] > responded.width:
        raise ImportFailed(
            f"{where}: rewards have shape {list(rewards.shape)}, but responses have {list(responded.mask.shape)}"
        )
    masks = responded.mask[:, : rewards.shape[1]]
    return np.array([row[mask].sum() for row, mask in zip(rewards, masks, strict=True)], np.float64)


def _experts(fields: Fields, shape: tuple[int, ...], where: str) -> np.ndarray | None:
    """Return the engine's router choices [B, P + T, L, S], or None if the trainer replaced them (replay mode R2)."""
    found = _array(fields, "rollout_expert_ids", 4) if fields.get("train_logprobs") is None else None
    if found is not None and found.shape[:2] != shape:
        raise ImportFailed(
            f"{where}: routed_experts has shape {list(found.shape)}, but attention_mask has {list(shape)}. Leave it "
            "out with --map routed_experts="
        )
    return found


def _aligned(fields: Fields, column: str, shape: tuple[int, int], where: str) -> np.ndarray | None:
    found = _array(fields, column, 2)
    if found is not None and found.shape != shape:
        raise ImportFailed(f"{where}: {column} has shape {list(found.shape)}, but responses have {list(shape)}")
    return found


_TEXT_FIELDS = ("input", "output", "gts", "score", "step", "request_id", "uid")


def _text_row(fields: Fields, *_: Any) -> list[dict[str, Any]]:
    return [{**fields.cells("step", "group_id", "reward"), "rewards": fields.numbers(_TEXT_FIELDS)}]


VERL = Format(
    name="verl",
    writes="`skip.rollout.dump_dir`, `DataProto.save_to_disk`, or `trainer.rollout_data_dir` (text only)",
    files="*.dp or <step>.jsonl",
    columns=COLUMNS,
    alignment="tensors are [B, T] and aligned with responses. Prompts are left-padded, responses right-padded",
    recognises=_recognises,
    parts=_parts,
    read=_read,
    lacks={
        "rollout": "the dump has no rollout_log_probs. verl keeps them with "
        "actor_rollout_ref.rollout.calculate_log_probs=True, except in rollout_data_dir",
        "train": "the dump has no old_log_probs. gen_batch.dp is written before the trainer scores the batch, and "
        "rollout_data_dir contains only text. Call batch.save_to_disk(PATH) after compute_log_prob and import PATH",
    },
)
