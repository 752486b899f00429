"""TRL names needed for recording, and the data lost without them.

Users subclass TRL's trainers, and unsloth and ms-swift copy them, so any class with these functions is hooked.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .patches import tested_releases, untested

_ALWAYS = {
    "train": ("train", "which train() call each step belongs to"),
    "compute_loss": ("compute_loss", "current logprobs"),
    "_maybe_log_save_evaluate": ("step_end", "per-step learning rate and grad norm, optimizer statistics"),
    "log": ("log", "logged metrics"),
}
POINTS = _ALWAYS | {
    "_generate_and_score_completions": ("generate_and_score", "sequences"),
    "_generate": ("generate", "sequences"),
    "_calculate_rewards": ("calculate_rewards", "rewards"),
    "_get_per_token_logps_and_entropies": ("score", "train, current and reference logprobs"),
}
ASYNC_POINTS = _ALWAYS | {
    "get_train_dataloader": ("dataloader", "sequences"),
    "_sync_weight": ("sync_weights", "policy versions"),
    "_streaming_iter": ("send_weights", "the engine's weights"),
}
"""Functions to hook in trainers that generate their own samples, and in trainers with a queue. See patches.Points."""

NEEDED = ("_generate_and_score_completions", "_generate")
"""Functions required to record a trainer's sequences."""

ENGINE_MODULES = ("trl.generation.vllm_generation", "trl.generation.vllm_client", "trl.extras.vllm_client")
"""Modules with TRL's vLLM clients. The last one exists only before TRL 0.28."""


@dataclass(frozen=True, slots=True)
class Attribute:
    gives: str
    """Data that is lost if the attribute is missing."""
    paths: tuple[str, ...]
    """Dotted attribute paths from the trainer, newest release first."""


def _of_tokenizer(name: str) -> tuple[str, ...]:
    """Return a tokenizer attribute's paths in TRL 1.3 and newer, in older releases, and in multimodal processors."""
    return f"_tokenizer.{name}", name, f"processing_class.{name}", f"processing_class.tokenizer.{name}"


# In TRL 1.14 and newer, a trainer may have several end tokens (`eos_token_ids`).
END_TOKENS = Attribute("finish reasons", ("eos_token_ids", *_of_tokenizer("eos_token_id")))
PAD_TOKEN = Attribute("finish reasons for responses that end with padding", _of_tokenizer("pad_token_id"))
TEMPERATURE = Attribute("the trainer's temperature", ("temperature", "args.temperature"))
NUM_GENERATIONS = Attribute("which responses share a prompt", ("num_generations", "args.num_generations"))
REWARD_WEIGHTS = Attribute("rewards", ("reward_weights",))
REWARD_NAMES = Attribute("rewards", ("reward_func_names",))
SERVER_URL = Attribute(  # the paths in TRL 0.28 and newer, in older releases, and in AsyncGRPOTrainer
    "the server's configuration",
    ("vllm_generation.vllm_client.base_url", "vllm_client.base_url", "vllm_client.server_url"),
)
ATTRIBUTES = (END_TOKENS, PAD_TOKEN, TEMPERATURE, NUM_GENERATIONS)
GENERATING = (*ATTRIBUTES, REWARD_WEIGHTS, REWARD_NAMES)
"""Attributes read from trainers that generate their own samples."""


def find(trainer: Any, attribute: Attribute) -> Any:
    for path in attribute.paths:
        value = trainer
        for name in path.split("."):
            value = getattr(value, name, None)
        if value is not None:
            return value
    return None


def lost(trainer: Any) -> Iterable[str]:
    for attribute in ATTRIBUTES if is_asynchronous(type(trainer)) else GENERATING:
        if find(trainer, attribute) is None:
            yield f"not recorded: {attribute.gives} ({type(trainer).__qualname__} has no {', no '.join(attribute.paths)})"


def end_tokens(trainer: Any) -> set[int]:
    ends = find(trainer, END_TOKENS)
    return set() if ends is None else {ends} if isinstance(ends, int) else {int(token) for token in ends}


def engine_classes(name: str) -> list[type]:
    found = (getattr(sys.modules.get(module), name, None) for module in ENGINE_MODULES)
    return [owner for owner in found if owner is not None]


def fused_lm_head() -> str | None:
    """Return the name of TRL's function that adds a fused head, or None before TRL 1.15. Replays call that function."""
    import trl.trainer.utils as utils

    return "trl.trainer.utils.add_fused_lm_head" if hasattr(utils, "add_fused_lm_head") else None


def sampled_logprobs(generated: Sequence[Any], lengths: list[int]) -> list[list[float]] | None:
    """Return the sampled logprobs of each response in `_generate`'s result (TRL before 0.28), or None if missing."""
    for values in generated[2:]:
        rows: list[Any] = values if isinstance(values, list) and len(values) == len(lengths) else [None]
        fits = all(isinstance(row, list) and len(row) == length for row, length in zip(rows, lengths, strict=False))
        if fits and all(isinstance(value, float) for row in rows for value in row):
            return rows
    return None


TRL_LOSSES = ("trl.trainer.", "trl.experimental.async_grpo.", "transformers.")


def name_of(trainer_class: type) -> str:
    return f"{trainer_class.__module__}.{trainer_class.__qualname__}"


def trl_version() -> str | None:
    return getattr(sys.modules.get("trl"), "__version__", None)


def is_asynchronous(trainer_class: type) -> bool:
    return all(callable(getattr(trainer_class, name, None)) for name in ("_sync_weight", "_streaming_iter"))


def unrecorded(trainer_class: type) -> str | None:
    if is_asynchronous(trainer_class):
        return None
    lacking = [name for name in NEEDED if not callable(getattr(trainer_class, name, None))]
    return _unrecorded(trainer_class, f"it has no {' and no '.join(lacking)}") if lacking else None


def unknown_output(trainer_class: type, output: Any) -> str | None:
    if isinstance(output, dict):
        needed = ("prompt_ids", "completion_ids", "completion_mask", "advantages")
        lacking = [name for name in needed if name not in output]
        found = f"a dict without {', '.join(lacking)}" if lacking else None
    else:
        found = f"a {type(output).__name__} instead of a dict"
    return None if found is None else _unrecorded(trainer_class, f"its {NEEDED[0]} returns {found}")


def _unrecorded(trainer_class: type, reason: str) -> str:
    version = trl_version()
    release = ""
    if version is not None and untested("trl", version):
        release = f" (trl {version} is not a tested version; tested: {tested_releases('trl')})"
    return (
        f"trainer {trainer_class.__qualname__} in module {trainer_class.__module__} is not recorded, because "
        f"{reason}{release}; for other trainers and your own training loop, use tim_trace.Recorder"
    )


def own_loss(trainer_class: type) -> str | None:
    for name in ("compute_loss", "_compute_loss"):
        function = inspect.unwrap(getattr(trainer_class, name, own_loss))
        module = str(getattr(function, "__module__", ""))
        if function is not own_loss and not module.startswith(TRL_LOSSES):
            return (
                f"{name_of(trainer_class)} overrides {name} (in {module}), but `objective` and `gradient` use the loss "
                "derived from TRL's settings"
            )
    return None
