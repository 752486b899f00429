"""The runs to generate: every cause with several seeds, each with a healthy twin that differs only in the switch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from laboratory import Plan, perform
from switches import Switches
from truth import Member

CAUSES: dict[str, tuple[Switches, ...]] = {
    "quantised": (Switches(weight_bits=3), Switches(weight_bits=3, begins=0.35)),
    "cache": (Switches(cache="int2"), Switches(cache="int2", begins=0.35)),
    "truncation": (Switches(top_p=0.5), Switches(top_p=0.5, begins=0.35)),
    "temperature": (Switches(temperature=2.5), Switches(temperature=3.0, begins=0.35), Switches(temperature=0.3)),
    "partial_sync": (Switches(unsynchronised=0.5), Switches(unsynchronised=0.7)),
    "stale": (Switches(stale=12), Switches(stale=16), Switches(stale=16, declares_stale=False)),
    "rate": (Switches(rate_spike=20.0), Switches(rate_factor=8.0), Switches(rate_spike=40.0)),
    "adam": (Switches(betas=(0.99, 0.3)), Switches(betas=(0.995, 0.5)), Switches(betas=(0.98, 0.0))),
    "noisy_reward": (Switches(noisy_reward=1.0), Switches(noisy_reward=0.9, begins=0.35)),
    "inverted_reward": (Switches(inverted_reward=0.7), Switches(inverted_reward=0.6, begins=0.35)),
    "length": (Switches(length_reward=3.0), Switches(length_reward=3.0, begins=0.35)),
    "pairing": (
        Switches(pairing=1), Switches(pairing=3, begins=0.35), Switches(pairing=1, pairs_advantages=True),
    ),
    "entropy": (Switches(entropy_coefficient=-2.0), Switches(entropy_coefficient=1.0)),
    "harmless": (
        Switches(weight_bits=8), Switches(cache="fp8"), Switches(cache="bf16"), Switches(stale=2),
    ),
}  # fmt: skip
"""Switches of each cause, one of which each seed uses; those of `harmless` have no effect on training."""

OF_ENGINE = ("quantised", "cache", "truncation", "temperature", "partial_sync", "stale", "harmless")
"""Causes in the engine, whose twin has an exact engine."""

FAMILIES = {
    "quantised": "mismatch",
    "cache": "mismatch",
    "truncation": "mismatch",
    "temperature": "mismatch",
    "partial_sync": "mismatch",
    "stale": "staleness",
    "rate": "optimizer",
    "adam": "optimizer",
    "noisy_reward": "reward",
    "inverted_reward": "reward",
    "length": "length",
    "pairing": "pairing",
    "entropy": "entropy",
}
"""The suspect that `tim-trace attribute` should name, by cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Settings from which runs are drawn."""

    tasks: tuple[str, ...]
    architectures: tuple[str, ...]
    first_seed: int
    steps: int = 200
    rate: float = 2e-4


SPLITS = {
    "tuning": Split(tasks=("sort", "mirror"), architectures=("qwen3", "llama"), first_seed=0),
    "heldout": Split(tasks=("sum", "unique", "running-sum"), architectures=("gpt_neox", "olmo2"), first_seed=5000),
}


def members(split_name: str, num_seeds: int | None = None) -> list[Member]:
    """Return the runs of a split: for each seed a healthy run, and one run per cause that differs only in that switch.
    The healthy runs alternate between three engines: float32 with a KV cache, exact, bfloat16.
    """
    split, found = SPLITS[split_name], []
    for number in range(num_seeds or 4):
        engine = ({}, {"exact": True}, {"engine_dtype": "bf16"})[number % 3]
        base = Plan(
            task=split.tasks[number % len(split.tasks)],
            architecture=split.architectures[number // len(split.tasks) % len(split.architectures)],
            algorithm=("grpo", "reinforce")[(number + number // 2) % 2],
            rate=split.rate,
            steps=split.steps,
            seed=split.first_seed + number,
            switches=Switches(**engine),
        )
        found.append(_member(base, "sound", base))
        for cause, options in CAUSES.items():
            said = options[number % len(options)].said
            sound_engine = {} if cause in OF_ENGINE and "exact" in engine else engine
            plan = replace(base, switches=Switches(**sound_engine | said))
            found.append(_member(plan, cause, base))
    return found


def _member(plan: Plan, cause: str, twin: Plan) -> Member:
    label = {"cause": FAMILIES.get(cause, cause), "detail": cause, "twin": twin.name}
    return Member(name=plan.name, label=label, perform=partial(perform, plan))
