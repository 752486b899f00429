"""The splits and the models that each trains.

The held-out split shares no architecture, seed, vocabulary or length with the one for tuning.
"""

from __future__ import annotations

from dataclasses import dataclass

from tiny_models import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A named set of models for generating traces."""

    name: str
    recipes: tuple[Recipe, ...]
    seed: int
    """Added to every trace's seed."""

    @property
    def dense(self) -> tuple[Recipe, ...]:
        return tuple(recipe for recipe in self.recipes if recipe.architecture not in MIXTURES)

    @property
    def mixtures(self) -> tuple[Recipe, ...]:
        return tuple(recipe for recipe in self.recipes if recipe.architecture in MIXTURES)


MIXTURES = ("qwen3_moe", "mixtral")

TUNING = Split(
    name="tuning",
    seed=0,
    recipes=(
        Recipe(architecture="qwen3", vocabulary=40, words=(1, 3), max_tokens=24, seed=11, num_active=40, learning_rate=1e-4),
        Recipe(architecture="qwen3", vocabulary=500, words=(80, 240), max_tokens=300, seed=12, num_active=40, learning_rate=1e-4, teaching_steps=400),
        Recipe(architecture="llama", vocabulary=8000, words=(8, 30), max_tokens=80, seed=13, num_active=50, layers=3, learning_rate=5e-5, tied=False),
        Recipe(architecture="llama", vocabulary=500, words=(4, 40), max_tokens=120, seed=14, num_active=40, hidden=96, layers=3, learning_rate=3e-4, teaching_steps=500),
        Recipe(architecture="gpt_neox", vocabulary=500, words=(2, 20), max_tokens=40, seed=15, num_active=40, layers=3, learning_rate=2e-4, teaching_steps=500),
        Recipe(architecture="gpt_neox", vocabulary=2000, words=(30, 120), max_tokens=160, seed=16, num_active=40, learning_rate=3e-5, tied=False, teaching_steps=400),
        Recipe(architecture="qwen3_moe", vocabulary=300, words=(6, 60), max_tokens=80, seed=17, num_active=30, learning_rate=1e-4, teaching_steps=400),
    ),
)  # fmt: skip

HELD_OUT = Split(
    name="heldout",
    seed=1_000_000,
    recipes=(
        Recipe(architecture="olmo2", vocabulary=900, words=(6, 70), max_tokens=96, seed=21, num_active=40, layers=3, learning_rate=1.5e-4, teaching_steps=500),
        Recipe(architecture="gemma2", vocabulary=60, words=(2, 6), max_tokens=36, seed=22, num_active=30, learning_rate=2e-4),
        Recipe(architecture="mistral", vocabulary=3000, words=(40, 160), max_tokens=220, seed=23, num_active=50, learning_rate=6e-5, teaching_steps=400, tied=False),
        Recipe(architecture="gpt2", vocabulary=400, words=(3, 30), max_tokens=56, seed=24, num_active=35, layers=4, learning_rate=1e-4, teaching_steps=500),
        Recipe(architecture="gemma3_text", vocabulary=6000, words=(10, 40), max_tokens=64, seed=25, num_active=45, learning_rate=4e-5),
        Recipe(architecture="mixtral", vocabulary=250, words=(8, 70), max_tokens=110, seed=26, num_active=30, learning_rate=2e-4, teaching_steps=400),
    ),
)  # fmt: skip

SMOKE = Split(
    name="smoke",
    seed=2_000_000,
    recipes=(
        Recipe(architecture="llama", vocabulary=120, words=(2, 8), max_tokens=40, seed=31, num_active=30, hidden=32, learning_rate=3e-4, teaching_steps=60),
        Recipe(architecture="qwen3_moe", vocabulary=120, words=(2, 6), max_tokens=32, seed=32, num_active=30, hidden=32, learning_rate=3e-4, teaching_steps=30),
    ),
)  # fmt: skip

SPLITS = {split.name: split for split in (TUNING, HELD_OUT, SMOKE)}
