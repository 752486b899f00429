"""Import TrainingInputBatch pickles from SkyRL. Shapes: S padded sequence length, T padded response length."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ...schemas.errors import ImportFailed
from ..ragged import Padding
from .arrays import Shell, known, raw_tensor
from .columns import RowBatch
from .dump_rows import added_columns, padded_columns
from .fields import PER_TOKEN
from .format import Format, Reading
from .pickles import BYTES, Budget, Foreign, NotPlain
from .torch_files import read_bytes, unpickled

_MODULES = "skyrl.backends.skyrl_train.training_batch skyrl_train.training_batch skyrl.train.training_batch skyrl.training_batch"
_NAMES = "TrainingInputBatch TrainingOutputBatch TensorBatch TrainingInput _rebuild_tensor_batch"
_SHELLS = known({_MODULES: {_NAMES: Shell}})

COLUMNS = {
    "sequences": ("sequences",),
    "attention_mask": ("attention_mask",),
    "response_mask": ("loss_mask",),
    "is_response": ("response_mask",),
    "rollout_logprobs": ("rollout_logprobs",),
    "train_logprobs": ("action_log_probs",),
    "reference_logprobs": ("base_action_log_probs",),
    "advantage": ("advantages",),
}


def _read(reading: Reading) -> Iterator[RowBatch]:
    ((path, content),) = reading.contents()
    batch = _tensors(unpickled(content, str(path), _SHELLS), str(path), reading.budget)
    fields = reading.fields(batch, str(path))
    sequences, attention = fields.array("sequences", 2), fields.array("attention_mask", 2)
    if sequences is None or attention is None or sequences.shape != attention.shape:
        raise ImportFailed(f"{path}: sequences or attention_mask is missing, or their shapes differ")
    names = ("response_mask", *PER_TOKEN, *fields.added_per_token)
    per_token = {name: found for name in names if (found := fields.array(name, 2)) is not None}
    is_response = fields.array("is_response", 2)
    shapes = {array.shape for array in (is_response, *per_token.values()) if array is not None}
    width = min((shape[1] for shape in shapes), default=0)
    if shapes != {(len(sequences), width)} or not 0 < width <= sequences.shape[1]:
        raise ImportFailed(f"{path}: masks and logprobs must all have the shape [{len(sequences)}, response width]")
    # In each row, the prompt ends where the first response token begins.
    there, whole = attention.astype(bool), sequences.shape[1]
    mask = there[:, -width:] if is_response is None else there[:, -width:] & is_response.astype(bool)
    first = whole - width + np.where(mask.any(axis=1), mask.argmax(axis=1), width)
    prompt = Padding.of(there & (np.arange(whole) < first[:, None]))
    step, responses = reading.part.step, sequences[:, -width:]
    columns = padded_columns(step, sequences, prompt, responses, Padding.of(mask), per_token)
    columns |= added_columns(fields, len(sequences), columns)
    yield RowBatch(file=str(path), columns=columns, numbers=range(1, len(sequences) + 1))


def _tensors(found: Any, where: str, budget: Budget) -> dict[str, Any]:
    states = [found.state, *found.arguments] if isinstance(found, Shell) else []
    state = next((each for each in states if isinstance(each, dict)), None)
    if not isinstance(state, dict) or not isinstance(state.get("batch_dict"), dict):
        raise ImportFailed(f"{where} is not a SkyRL TrainingInputBatch")
    try:
        return {
            name: value if isinstance(value, Foreign) else _tensor(value, where, budget)
            for name, value in state["batch_dict"].items()
            if isinstance(value, Foreign) or (isinstance(value, Mapping) and value.get("format") != "tensor_list")
        }
    except ValueError as error:
        if isinstance(error, ImportFailed):
            raise
        raise ImportFailed(f"{where}: a tensor cannot be read ({error})") from error


def _tensor(value: Mapping[str, Any], where: str, budget: Budget) -> Any:
    if value.get("format") == "torch":
        content = value.get("data")
        if not isinstance(content, BYTES):
            raise NotPlain("a tensor has no data")
        return read_bytes(content, where, {}, budget)
    return raw_tensor(value.get("dtype"), value.get("shape"), value.get("data"))


SKYRL = Format(
    name="skyrl",
    writes="`trainer.dump_data_batch=true`",
    files="dumped_data/global_step_<N>_training_input.pkl",
    columns=COLUMNS,
    alignment="masks and logprobs are [B, T] for each sequence's last T tokens. response_mask selects the response. "
    "-9999 means no logprob",
    pattern=r"global_step_(\d+)_training_input\.pkl",
    read=_read,
    lacks={
        "rollout": "the dump has no rollout_logprobs. SkyRL writes them with generator.sampling_params.logprobs=0",
        "train": "the dump has no action_log_probs",
    },
)
