"""Tiny language models, pretrained on an artificial language and trained by RL, with the weights of every version."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from language import Language
from sides import Side, State
from transformers import AutoModelForCausalLM


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Everything that determines a tiny model's weights."""

    architecture: str
    """transformers' model type."""
    vocabulary: int
    words: tuple[int, int]
    """Minimum and maximum number of words in a response."""
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
class TinyModel:
    """A trained model: its language, its configuration and its weights by version."""

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
    def class_name(self) -> str:
        return type(AutoModelForCausalLM.from_config(self.config)).__name__

    def side(self, state: State, **options: Any) -> Side:
        """A side with these weights."""
        return Side(config=self.config, state=state, **options)

    def prompts(self, chance: random.Random, count: int) -> tuple[list[str], torch.Tensor]:
        """Return prompts of one length in tokens, as text and [count, P]."""
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
