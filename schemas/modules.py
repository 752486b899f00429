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
"""Regular expressions for tensor names. The first match wins."""

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Config keys for the number of experts."""


def module_of(name: str) -> str:
    """Return a tensor's module name with layer and expert indices replaced by `*`.

    >>> module_of("model.layers.11.self_attn.q_proj.weight")
    'model.layers.*.self_attn.q_proj'
    """
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name).removesuffix(".weight").removesuffix(".bias")


def kind_of(name: str) -> str:
    """Return a tensor's module kind, one of KINDS.

    A norm inside an attention module counts as a norm. A tied head is stored under the embedding's name and counts as
    an embedding.

    >>> kind_of("model.layers.11.self_attn.q_norm.weight"), kind_of("model.layers.0.mlp.up_proj.weight")
    ('norm', 'mlp')
    """
    for kind, words in _WORDS:
        if re.search(words, name):
            return kind
    return OTHER


def has_experts(config: Mapping[str, Any]) -> bool:
    text = config.get("text_config") or config
    return any(text.get(name) for name in _EXPERTS)
