"""Worlds: tiny models that were taught a language and then trained by RL, with the weights of every version."""

from __future__ import annotations

import random
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from language import Language
from learning import low_rank_versions, reinforced_versions, taught
from sides import Side, State
from transformers import AutoConfig, AutoModelForCausalLM

NUM_VERSIONS = 14
"""Optimizer updates by RL that a world keeps."""

NUM_ADAPTER_VERSIONS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a world is made of."""

    architecture: str
    """transformers' model type."""
    vocabulary: int
    words: tuple[int, int]
    """Words of a response."""
    max_tokens: int
    seed: int
    hidden: int = 64
    layers: int = 2
    learning_rate: float = 4e-4
    """Of the RL updates."""
    teaching_steps: int = 300
    num_active: int = 120
    tied: bool = True

    @property
    def name(self) -> str:
        return f"{self.architecture}-v{self.vocabulary}-t{self.max_tokens}-s{self.seed}"


@dataclass(slots=True, kw_only=True)
class World:
    """A trained world."""

    recipe: Recipe
    language: Language
    config: Any
    versions: list[State]
    """Weights after 0, 1, ... RL updates."""
    adapters: list[State]
    """Merged weights after 0, 1, ... RL updates of a LoRA adapter on versions[0]."""

    @property
    def is_mixture(self) -> bool:
        return getattr(self.config, "num_experts_per_tok", None) is not None

    @property
    def model_class(self) -> str:
        return type(AutoModelForCausalLM.from_config(self.config)).__name__

    def side(self, state: State, **options: Any) -> Side:
        """A side with these weights."""
        return Side(config=self.config, state=state, **options)

    def prompts(self, chance: random.Random, count: int) -> tuple[list[str], torch.Tensor]:
        """Prompts of one length in tokens, as text and [count, P]."""
        num_digits = chance.randint(2, 6)
        texts: list[str] = []
        width = None
        for _ in range(2000):
            text = self.language.prompt(chance, num_digits)
            ids = self.language.encode(text)
            width = width or len(ids)
            if len(ids) == width:
                texts.append(text)
            if len(texts) == count:
                break
        return texts, torch.tensor([self.language.encode(text) for text in texts])


def load(recipe: Recipe, folder: Path) -> World:
    """The world of a recipe, trained now unless the folder has it."""
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
    return World(recipe=recipe, language=language, config=config, **states)


def _digest(recipe: Recipe, language: Language) -> str:
    """Names everything that training depends on, but the code."""
    chance = random.Random(0)
    said = [language.response(chance, language.prompt(chance, 3)) for _ in range(3)]
    return sha256(repr((recipe, said, NUM_VERSIONS, NUM_ADAPTER_VERSIONS)).encode()).hexdigest()[:8]


def _train(recipe: Recipe, language: Language, config: Any) -> dict[str, list[State]]:
    torch.manual_seed(recipe.seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    taught(model, language, recipe)
    world = World(recipe=recipe, language=language, config=config, versions=[_state(model)], adapters=[])
    adapters = low_rank_versions(model, world, NUM_ADAPTER_VERSIONS)
    return {"versions": reinforced_versions(model, world, NUM_VERSIONS), "adapters": adapters}


def _state(model: Any) -> State:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def _config(recipe: Recipe, size: int) -> Any:
    """A small configuration of any of the architectures; each takes the settings that it knows."""
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
