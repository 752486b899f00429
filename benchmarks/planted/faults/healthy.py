"""No fault at all: plain rounding, also where settings look odd, and passes that are equal to the last bit."""

from __future__ import annotations

import random
from typing import Any

from heads import Sampling

from .fault import Fault


def rounding(scenario: Any, index: int, chance: random.Random) -> Fault:
    """Both sides are right; they round differently."""
    odd = _ODD[index % len(_ODD)]
    belief = odd(scenario, chance) or {}
    return Fault(
        code="rounding", variant=odd.__name__.strip("_").replace("_", " "), strength=scenario.numerics, belief=belief
    )


def equal(scenario: Any, index: int, chance: random.Random) -> Fault:
    """Both sides are one engine."""
    scenario.same_engine = True
    if scenario.numerics not in ("bf16-bf16", "fp16-fp16"):
        scenario.numerics = "fp32"
    return Fault(code="equal", variant="one engine", strength=scenario.numerics, belief={"same_engine": True})


def _plain(scenario: Any, chance: random.Random) -> None:
    return None


def _temperature_on_both_sides(scenario: Any, chance: random.Random) -> None:
    scenario.sampling = Sampling(temperature=round(chance.choice([0.6, 0.7, 0.8, 1.2]), 2))


def _truncated_sampling_of_raw_logprobs(scenario: Any, chance: random.Random) -> dict[str, Any]:
    scenario.sampling = Sampling(top_p=chance.choice([0.8, 0.9, 0.95]), top_k=chance.choice([0, 20]))
    return {"logprobs_mode": "raw_logprobs"}


def _one_step(scenario: Any, chance: random.Random) -> None:
    scenario.num_steps = 1


def _one_sequence(scenario: Any, chance: random.Random) -> None:
    scenario.num_steps, scenario.num_groups, scenario.group_size = 1, 1, 1


def _few_tokens(scenario: Any, chance: random.Random) -> None:
    scenario.max_tokens, scenario.num_steps, scenario.num_groups, scenario.group_size = 8, 2, 1, 4


def _masked_tool_output(scenario: Any, chance: random.Random) -> None:
    scenario.tool_words = chance.choice([3, 6, 10])


def _recurring_prompts(scenario: Any, chance: random.Random) -> None:
    scenario.num_prompts = 2 * scenario.num_groups


def _no_versions(scenario: Any, chance: random.Random) -> dict[str, Any]:
    return {"policy_version": None}


def _several_engines(scenario: Any, chance: random.Random) -> dict[str, Any]:
    return {"replicas": chance.choice([2, 3])}


def _many_steps(scenario: Any, chance: random.Random) -> None:
    scenario.num_steps = min(12, len(scenario.states))
    scenario.num_groups = min(scenario.num_groups, 4)


_ODD = (
    _plain, _temperature_on_both_sides, _one_step, _truncated_sampling_of_raw_logprobs, _masked_tool_output, _few_tokens,
    _recurring_prompts, _no_versions, _several_engines, _one_sequence, _many_steps, _plain,
)  # fmt: skip
