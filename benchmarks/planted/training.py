"""Load tiny models from disk, and train those that are missing."""

from __future__ import annotations

import random
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from language import Language
from learning import low_rank_versions, reinforced_versions, taught
from sides import State
from tiny_models import Recipe, TinyModel
from transformers import AutoConfig, AutoModelForCausalLM

NUM_VERSIONS = 14
"""Number of RL updates whose weights are stored."""

NUM_ADAPTER_VERSIONS = 8


def load(recipe: Recipe, folder: Path) -> TinyModel:
    """Return the model of a recipe, loaded from the folder or trained and stored there."""
    language = Language(
        seed=recipe.seed, vocabulary=recipe.vocabulary, words=recipe.words, num_active=recipe.num_active
    )
    config = _config(recipe, language.size)
    path = folder / f"{recipe.name}-{_digest(recipe, language)}.pt"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(_train(recipe, language, config), path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)
    states = torch.load(path, weights_only=True, mmap=True)
    return TinyModel(recipe=recipe, language=language, config=config, **states)


def _digest(recipe: Recipe, language: Language) -> str:
    """Return a name for everything that training depends on except the code."""
    chance = random.Random(0)
    said = [language.response(chance, language.prompt(chance, 3)) for _ in range(3)]
    return sha256(repr((recipe, said, NUM_VERSIONS, NUM_ADAPTER_VERSIONS)).encode()).hexdigest()[:8]


def _train(recipe: Recipe, language: Language, config: Any) -> dict[str, list[State]]:
    torch.manual_seed(recipe.seed)
    module = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    taught(module, language, recipe)
    model = TinyModel(recipe=recipe, language=language, config=config, versions=[_state(module)], adapters=[])
    adapters = low_rank_versions(module, model, NUM_ADAPTER_VERSIONS)
    return {"versions": reinforced_versions(module, model, NUM_VERSIONS), "adapters": adapters}


def _state(module: Any) -> State:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def _config(recipe: Recipe, size: int) -> Any:
    """Return a small configuration of any architecture, which uses the settings that it supports."""
    common = {
        "vocab_size": size,
        "hidden_size": recipe.hidden,
        "intermediate_size": 2 * recipe.hidden,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": recipe.hidden // 4,
        "max_position_embeddings": 512,
        "tie_word_embeddings": recipe.tied,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "initializer_range": 0.05,
    }
    return AutoConfig.for_model(recipe.architecture, **common | _OWN.get(recipe.architecture, {}))


_OWN: dict[str, dict[str, Any]] = {
    "gpt_neox": {"rotary_pct": 0.5, "num_key_value_heads": 4},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "experts_implementation": "eager",
    },
    "mixtral": {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "experts_implementation": "eager",
        "sliding_window": None,
    },
    "gemma2": {"sliding_window": 4096, "query_pre_attn_scalar": 16},
    "gemma3_text": {"sliding_window": 4096, "query_pre_attn_scalar": 16},
    "mistral": {"sliding_window": None},
}
