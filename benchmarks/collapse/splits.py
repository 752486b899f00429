"""Which runs are made: every cause on several seeds, beside the sound twin that shares everything but the switch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle

from runs import Plan
from switches import Switches

CAUSES: dict[str, tuple[Switches, ...]] = {
    "quantised": (
        Switches(weight_bits=3), Switches(weight_bits=3, begins=0.35), Switches(weight_bits=4, begins=0.35),
    ),
    "cache": (Switches(cache="fp8_coarse"), Switches(cache="fp8_coarse", begins=0.35)),
    "truncation": (Switches(top_p=0.6), Switches(top_p=0.5, begins=0.35)),
    "temperature": (Switches(temperature=1.6), Switches(temperature=1.8, begins=0.35), Switches(temperature=0.5)),
    "partial_sync": (Switches(unsynchronised=0.5), Switches(unsynchronised=0.7)),
    "stale": (Switches(stale=4), Switches(stale=8), Switches(stale=6, declares_stale=False)),
    "rate": (Switches(rate_spike=20.0), Switches(rate_factor=8.0), Switches(rate_spike=40.0)),
    "adam": (Switches(betas=(0.0, 0.1)), Switches(betas=(0.9, 0.05)), Switches(betas=(0.0, 0.0))),
    "noisy_reward": (Switches(noisy_reward=1.0), Switches(noisy_reward=0.8, begins=0.35)),
    "inverted_reward": (Switches(inverted_reward=0.7), Switches(inverted_reward=0.6, begins=0.35)),
    "length": (Switches(length_reward=1.0), Switches(length_reward=2.0, begins=0.35)),
    "pairing": (
        Switches(pairing=1), Switches(pairing=3, begins=0.35), Switches(pairing=1, pairs_advantages=True),
    ),
    "entropy": (Switches(entropy_coefficient=-0.2), Switches(entropy_coefficient=0.3)),
    "harmless": (
        Switches(weight_bits=8), Switches(cache="bf16"), Switches(engine_dtype="bf16"), Switches(epsilon=1e-6),
    ),
}  # fmt: skip
"""Cause -> its switches, from which each seed takes one; `harmless` is wrong in name and does no harm."""

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
"""Cause -> the suspect that `tim-trace attribute` should name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Settings that runs are drawn from."""

    tasks: tuple[str, ...]
    architectures: tuple[str, ...]
    first_seed: int
    steps: int = 200
    rate: float = 5e-4


SPLITS = {
    "tuning": Split(tasks=("sort", "mirror"), architectures=("qwen3", "llama"), first_seed=0),
    "heldout": Split(tasks=("sum", "unique", "running-sum"), architectures=("gpt_neox", "olmo2"), first_seed=5000),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A run of a split, and the name of its sound twin."""

    plan: Plan
    cause: str
    twin: str


def members(split: Split, num_seeds: int) -> list[Member]:
    """The runs of a split: for each seed a sound one (exact on every third seed), and one for each cause."""
    found = []
    tasks, architectures = cycle(split.tasks), cycle(split.architectures)
    for number in range(num_seeds):
        base = Plan(
            task=next(tasks),
            architecture=next(architectures) if number % len(split.tasks) == 0 else found[-1].plan.architecture,
            algorithm=("grpo", "reinforce")[(number + number // 2) % 2],
            rate=split.rate,
            steps=split.steps,
            seed=split.first_seed + number,
        )
        twin = base.twin(exact=number % 3 == 1)
        found.append(Member(plan=twin, cause="sound", twin=twin.name))
        for cause, options in CAUSES.items():
            plan = base.twin(**options[number % len(options)].said)
            found.append(Member(plan=plan, cause=cause, twin=twin.name))
    return found
