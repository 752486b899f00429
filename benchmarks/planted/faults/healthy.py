"""No fault at all: plain rounding, also where settings look odd, and passes that are equal to the last bit."""

from __future__ import annotations

import random
from typing import Any

from heads import Sampling

from .fault import Fault


def rounding(scene: Any, index: int, chance: random.Random) -> Fault:
    """Both sides are right; they round differently."""
    odd = _ODD[index % len(_ODD)]
    belief = odd(scene, chance) or {}
    return Fault(
        code="rounding", variant=odd.__name__.strip("_").replace("_", " "), strength=scene.numerics, belief=belief
    )


def equal(scene: Any, index: int, chance: random.Random) -> Fault:
    """Both sides are one engine."""
    scene.same_engine = True
    if scene.numerics not in ("bf16-bf16", "fp16-fp16"):
        scene.numerics = "fp32"
    return Fault(code="equal", variant="one engine", strength=scene.numerics, belief={"same_engine": True})


def _plain(scene: Any, chance: random.Random) -> None:
    return None


def _temperature_on_both_sides(scene: Any, chance: random.Random) -> None:
    scene.sampling = Sampling(temperature=round(chance.choice([0.6, 0.7, 0.8, 1.2]), 2))


def _truncated_sampling_of_raw_logprobs(scene: Any, chance: random.Random) -> dict[str, Any]:
    scene.sampling = Sampling(top_p=chance.choice([0.8, 0.9, 0.95]), top_k=chance.choice([0, 20]))
    return {"logprobs_mode": "raw_logprobs"}


def _one_step(scene: Any, chance: random.Random) -> None:
    scene.num_steps = 1


def _one_sequence(scene: Any, chance: random.Random) -> None:
    scene.num_steps, scene.num_groups, scene.group_size = 1, 1, 1


def _few_tokens(scene: Any, chance: random.Random) -> None:
    scene.max_tokens, scene.num_steps, scene.num_groups, scene.group_size = 8, 2, 1, 4


def _masked_tool_output(scene: Any, chance: random.Random) -> None:
    scene.tool_words = chance.choice([3, 6, 10])


def _recurring_prompts(scene: Any, chance: random.Random) -> None:
    scene.num_prompts = 2 * scene.num_groups


def _no_versions(scene: Any, chance: random.Random) -> dict[str, Any]:
    return {"policy_version": None}


def _several_engines(scene: Any, chance: random.Random) -> dict[str, Any]:
    return {"replicas": chance.choice([2, 3])}


def _many_steps(scene: Any, chance: random.Random) -> None:
    scene.num_steps = min(12, len(scene.states))
    scene.num_groups = min(scene.num_groups, 4)


_ODD = (
    _plain, _temperature_on_both_sides, _one_step, _truncated_sampling_of_raw_logprobs, _masked_tool_output, _few_tokens,
    _recurring_prompts, _no_versions, _several_engines, _one_sequence, _many_steps, _plain,
)  # fmt: skip
