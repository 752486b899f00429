"""The names of TRL that recording uses, release by release, and what is lost where a release has none of them.

Code that reads a trainer asks here, so that a name that moves costs what it gives, and a note says so.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

POINTS = {
    "train": "steps that a second call of train() makes again, apart from those of the first",
    "_calculate_rewards": "rewards",
    "_get_per_token_logps_and_entropies": "train, current and reference logprobs",
    "compute_loss": "current logprobs",
    "_maybe_log_save_evaluate": "learning rate and grad norm of every step, statistics of the optimizer",
    "log": "logged metrics",
}
"""Function that a recorded trainer may lack -> what it gives."""

NEEDED = ("_generate_and_score_completions", "_generate")
"""Functions without which no sequence is recorded."""

NEEDED_ASYNC = ("_sync_weight", "_streaming_iter")
"""Functions of a trainer whose samples come from a queue, as AsyncGRPOTrainer's do."""

OUTPUT = ("prompt_ids", "completion_ids", "completion_mask", "advantages")
"""What `_generate_and_score_completions` returns by name, of what is recorded."""

ENGINE_MODULES = ("trl.generation.vllm_generation", "trl.generation.vllm_client", "trl.extras.vllm_client")
"""Where TRL's classes around vLLM lie: the last one before 0.28."""


@dataclass(frozen=True, slots=True)
class Attribute:
    """Something that is read of a trainer."""

    gives: str
    """What is not recorded where a trainer has none of its paths."""
    paths: tuple[str, ...]
    """Dotted, from the trainer; the newest release's first."""


def _of_tokenizer(name: str) -> tuple[str, ...]:
    """Where releases have a token of the tokenizer: from 1.3 on, before, and with a processor of images."""
    return f"_tokenizer.{name}", name, f"processing_class.{name}", f"processing_class.tokenizer.{name}"


# From 1.14 on a trainer has several end tokens.
END_TOKENS = Attribute("why responses ended", ("eos_token_ids", *_of_tokenizer("eos_token_id")))
PAD_TOKEN = Attribute("responses that end with padding, which count as cut off", _of_tokenizer("pad_token_id"))
TEMPERATURE = Attribute("the temperature of the trainer's passes", ("temperature", "args.temperature"))
NUM_GENERATIONS = Attribute("which responses share a prompt", ("num_generations", "args.num_generations"))
REWARD_WEIGHTS = Attribute("rewards", ("reward_weights",))
REWARD_NAMES = Attribute("rewards", ("reward_func_names",))
SERVER_URL = Attribute(  # from 0.28 on, before, and of AsyncGRPOTrainer
    "the server's configuration",
    ("vllm_generation.vllm_client.base_url", "vllm_client.base_url", "vllm_client.server_url"),
)
ATTRIBUTES = (END_TOKENS, PAD_TOKEN, TEMPERATURE, NUM_GENERATIONS)
"""What every trainer has."""
GENERATING = (*ATTRIBUTES, REWARD_WEIGHTS, REWARD_NAMES)
"""What a trainer that generates has; samples from a queue bring their rewards along."""


def find(trainer: Any, attribute: Attribute) -> Any:
    """Return what a trainer has of an attribute; None where it has nothing."""
    for path in attribute.paths:
        value = trainer
        for name in path.split("."):
            value = getattr(value, name, None)
        if value is not None:
            return value
    return None


def lost(trainer: Any, attributes: Iterable[Attribute]) -> Iterable[str]:
    """Sentences on what is not recorded of a trainer because its release has moved an attribute."""
    for attribute in attributes:
        if find(trainer, attribute) is None:
            yield f"not recorded: {attribute.gives} ({type(trainer).__qualname__} has no {', no '.join(attribute.paths)})"


def end_tokens(trainer: Any) -> set[int]:
    """Return the tokens that end a response; empty where the trainer does not have them."""
    ends = find(trainer, END_TOKENS)
    return set() if ends is None else {ends} if isinstance(ends, int) else {int(token) for token in ends}


def engine_classes(name: str) -> list[type]:
    """Return TRL's imported classes of this name around vLLM."""
    found = (getattr(sys.modules.get(module), name, None) for module in ENGINE_MODULES)
    return [owner for owner in found if owner is not None]


def fused_lm_head() -> str | None:
    """Return the function that gives TRL's model its fused head (from 1.15): replaying calls the same."""
    import trl.trainer.utils as utils

    return "trl.trainer.utils.add_fused_lm_head" if hasattr(utils, "add_fused_lm_head") else None


def sampled_logprobs(generated: Sequence[Any], lengths: list[int]) -> list[list[float]] | None:
    """Find the sampled tokens' logprobs in what `_generate` returned: B lists of floats, as long as the responses.

    Before 0.28 the trainer's output does not have them.
    """
    for values in generated[2:]:
        rows: list[Any] = values if isinstance(values, list) and len(values) == len(lengths) else [None]
        fits = all(isinstance(row, list) and len(row) == length for row, length in zip(rows, lengths, strict=False))
        if fits and all(isinstance(value, float) for row in rows for value in row):
            return rows
    return None
