"""Classify modules by tensor name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

EMBEDDING, ATTENTION, MLP, NORM, HEAD, OTHER = "embedding", "attention", "mlp", "norm", "head", "other"
KINDS = (EMBEDDING, ATTENTION, MLP, NORM, HEAD, OTHER)

_WORDS = (
    (HEAD, r"lm_head|embed_out|output_layer"),
    (NORM, r"norm|\bln"),
    (EMBEDDING, r"embed|wte|wpe|word_embeddings"),
    (ATTENTION, r"attn|attention"),
    (MLP, r"mlp|ffn|feed_forward|expert|moe|router|fc\d?|dense_h"),
)

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def module_of(name: str) -> str:
    """Return a tensor's module name with layer and expert indices replaced by `*`.

    >>> module_of("model.layers.11.self_attn.q_proj.weight")
    'model.layers.*.self_attn.q_proj'
    """
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name).removesuffix(".weight").removesuffix(".bias")


def kind_of(name: str) -> str:
    """Return the kind of a tensor's module. A norm inside attention counts as a norm, a tied head as an embedding."""
    for kind, words in _WORDS:
        if re.search(words, name):
            return kind
    return OTHER


def has_experts(config: Mapping[str, Any]) -> bool:
    text = config.get("text_config") or config
    return any(text.get(name) for name in _EXPERTS)
