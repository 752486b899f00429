"""What callers give vLLM as prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

EMBEDDED = (
    "rollouts of prompts that are given as embeddings (prompt_embeds) are not recorded: their token ids are unknown"
)


def has_embeddings(prompts: Any) -> bool:
    """Whether any of a call's prompts is embeddings in place of tokens."""
    given = prompts if isinstance(prompts, (list, tuple)) else (prompts,)
    mappings = {kind for kind in set(map(type, given)) if issubclass(kind, Mapping)}
    return any(type(prompt) in mappings and prompt.get("prompt_embeds") is not None for prompt in given)


def num_prompts(prompts: Any) -> int:
    """How many requests a call makes of its prompts or conversations."""
    if isinstance(prompts, (str, dict)) or not isinstance(prompts, Sequence) or not len(prompts):
        return 1
    first = prompts[0]
    if isinstance(first, int):
        return 1
    if isinstance(first, dict) and "role" in first:
        return 1
    return len(prompts)
