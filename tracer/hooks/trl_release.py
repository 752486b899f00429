"""Names in TRL that recording uses, by release, and what is not recorded if they are missing.

Code that reads a trainer looks names up here, so that a renamed attribute costs only its own values and is reported in a note.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

POINTS = {
    "train": "the repeated steps of a second call of train() as an attempt of their own",
    "_calculate_rewards": "rewards",
    "_get_per_token_logps_and_entropies": "train, current and reference logprobs",
    "compute_loss": "current logprobs",
    "_maybe_log_save_evaluate": "learning rate and grad norm of every step, statistics of the optimizer",
    "log": "logged metrics",
}
"""Optional function of a recorded trainer -> what is recorded from it."""

NEEDED = ("_generate_and_score_completions", "_generate")
"""Functions without which no sequence is recorded."""

NEEDED_ASYNC = ("_sync_weight", "_streaming_iter")
"""Functions that identify a trainer with a sample queue, such as AsyncGRPOTrainer."""

OUTPUT = ("prompt_ids", "completion_ids", "completion_mask", "advantages")
"""Required keys in the result of `_generate_and_score_completions`."""

ENGINE_MODULES = ("trl.generation.vllm_generation", "trl.generation.vllm_client", "trl.extras.vllm_client")
"""Modules of TRL's classes around vLLM; the last one is for releases before 0.28."""


@dataclass(frozen=True, slots=True)
class Attribute:
    """A value read from a trainer."""

    gives: str
    """What is not recorded if none of the paths exists."""
    paths: tuple[str, ...]
    """Dotted paths from the trainer; the newest release's first."""


def _of_tokenizer(name: str) -> tuple[str, ...]:
    """Return the paths to one of a tokenizer's special tokens: in TRL 1.3 and newer, before 1.3, and with an image
    processor."""
    return f"_tokenizer.{name}", name, f"processing_class.{name}", f"processing_class.tokenizer.{name}"


# In TRL 1.14 and newer a trainer has several end tokens.
END_TOKENS = Attribute("finish reasons", ("eos_token_ids", *_of_tokenizer("eos_token_id")))
PAD_TOKEN = Attribute("responses that end with padding, which count as cut off", _of_tokenizer("pad_token_id"))
TEMPERATURE = Attribute("the temperature of the trainer's passes", ("temperature", "args.temperature"))
NUM_GENERATIONS = Attribute("which responses share a prompt", ("num_generations", "args.num_generations"))
REWARD_WEIGHTS = Attribute("rewards", ("reward_weights",))
REWARD_NAMES = Attribute("rewards", ("reward_func_names",))
SERVER_URL = Attribute(  # in TRL 0.28 and newer, before 0.28, and in AsyncGRPOTrainer
    "the server's configuration",
    ("vllm_generation.vllm_client.base_url", "vllm_client.base_url", "vllm_client.server_url"),
)
ATTRIBUTES = (END_TOKENS, PAD_TOKEN, TEMPERATURE, NUM_GENERATIONS)
"""Attributes that every recorded trainer has."""
GENERATING = (*ATTRIBUTES, REWARD_WEIGHTS, REWARD_NAMES)
"""Attributes of a trainer that generates; samples from a queue carry their own rewards."""


def find(trainer: Any, attribute: Attribute) -> Any:
    """Return the first value at an attribute's paths; None if all are missing."""
    for path in attribute.paths:
        value = trainer
        for name in path.split("."):
            value = getattr(value, name, None)
        if value is not None:
            return value
    return None


def lost(trainer: Any, attributes: Iterable[Attribute]) -> Iterable[str]:
    """Yield a sentence for each missing attribute, whose values are therefore not recorded."""
    for attribute in attributes:
        if find(trainer, attribute) is None:
            yield f"not recorded: {attribute.gives} ({type(trainer).__qualname__} has no {', no '.join(attribute.paths)})"


def end_tokens(trainer: Any) -> set[int]:
    """Return the tokens that end a response; empty if unknown."""
    ends = find(trainer, END_TOKENS)
    return set() if ends is None else {ends} if isinstance(ends, int) else {int(token) for token in ends}


def engine_classes(name: str) -> list[type]:
    """Return the imported TRL classes around vLLM that have this name."""
    found = (getattr(sys.modules.get(module), name, None) for module in ENGINE_MODULES)
    return [owner for owner in found if owner is not None]


def fused_lm_head() -> str | None:
    """Return the function with which TRL (from 1.15) adds a fused head to its model; a replay calls the same function."""
    import trl.trainer.utils as utils

    return "trl.trainer.utils.add_fused_lm_head" if hasattr(utils, "add_fused_lm_head") else None


def sampled_logprobs(generated: Sequence[Any], lengths: list[int]) -> list[list[float]] | None:
    """Return the sampled tokens' logprobs from the result of `_generate`: B lists of floats, as long as the responses.

    This is needed for TRL before 0.28, where the trainer's output does not include the engine's logprobs.
    """
    for values in generated[2:]:
        rows: list[Any] = values if isinstance(values, list) and len(values) == len(lengths) else [None]
        fits = all(isinstance(row, list) and len(row) == length for row, length in zip(rows, lengths, strict=False))
        if fits and all(isinstance(value, float) for row in rows for value in row):
            return rows
    return None
