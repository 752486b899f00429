"""Faults of one side's weights: stale, partly synchronised, without adapter, quantised, or in a subset only."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from heads import Sampling
from sides import Side, State
from torch import Tensor

from .fault import Fault, FaultContext, spread


def _weighed(choose: Any) -> Any:
    """A change of one side's weights: choose(context) -> state."""
    return lambda side, context: replace(side, state=choose(context))


def _back(context: FaultContext, count: int) -> State:
    return context.scenario.states[max(0, context.version - count)]


def stale_weights(scenario: Any, index: int, chance: random.Random) -> Fault:
    """The engine is some optimizer updates behind; the record says otherwise."""
    behind = [1, 2, 4, 1, 8, 3, 2, 6, 1, 5, 2, 1][index % 12]
    scenario.num_steps = min(scenario.num_steps, len(scenario.states) - behind)
    scenario.first_version = max(scenario.first_version, behind)
    scenario.first_version = min(scenario.first_version, len(scenario.states) - scenario.num_steps)
    if index % 6 == 5:
        frozen = scenario.version(0) - 1
        return Fault(
            code="stale_weights", variant="synchronisation has stopped", strength=frozen,
            rollout=_weighed(lambda context: scenario.states[max(0, frozen)]),
        )  # fmt: skip
    if index % 6 == 4:
        return _scored_too_late(scenario, behind)
    belief: dict[str, Any] = {}
    if index % 5 == 3:
        belief = {"policy_version": None}
    if index % 7 == 6:
        belief = {"sampling_version_behind": behind}
    variant = "versions behind" + (", and says so" if "sampling_version_behind" in belief else "")
    return Fault(
        code="stale_weights", variant=variant, strength=behind, belief=belief,
        rollout=_weighed(lambda context: _back(context, behind)),
    )  # fmt: skip


def _scored_too_late(scenario: Any, ahead: int) -> Fault:
    """The trainer scores once it has updated its weights."""
    scenario.first_version = min(scenario.first_version, len(scenario.states) - scenario.num_steps - ahead)
    return Fault(
        code="stale_weights", variant="the trainer scores after its update", strength=ahead,
        train=_weighed(lambda context: scenario.states[min(context.version + ahead, len(scenario.states) - 1)]),
    )  # fmt: skip


_MODULES = {
    "head and embeddings": r"embed|lm_head|wte|embed_out",
    "one layer": r"layers?\.1\.|\bh\.1\.",
    "norms": r"norm|ln_",
    "attention": r"attn|attention",
    "mlp": r"mlp|block_sparse|experts|gate",
    "first layer": r"layers?\.0\.|\bh\.0\.",
}


def partial_sync(scenario: Any, index: int, chance: random.Random) -> Fault:
    """Some modules of the engine stay at an older version."""
    name = list(_MODULES)[index % len(_MODULES)]
    behind = [1, 99, 2, 4, 99, 99][(index * 5 + index // 6) % 6]
    scenario.first_version = max(scenario.first_version, min(3, len(scenario.states) - scenario.num_steps))

    def choose(context: FaultContext) -> State:
        new, old = context.scenario.states[context.version], _back(context, behind)
        return {key: old[key] if re.search(_MODULES[name], key) else value for key, value in new.items()}

    variant = f"{name} {'never updated' if behind == 99 else 'behind'}"
    return Fault(code="partial_sync", variant=variant, strength=behind, rollout=_weighed(choose))


def adapter(scenario: Any, index: int, chance: random.Random) -> Fault:
    """The trainer has a LoRA adapter that the engine lacks, wholly or in part."""
    scenario.states = scenario.model.adapters
    scenario.num_steps = min(scenario.num_steps, len(scenario.states) - 1)
    scenario.first_version = 1 + chance.randrange(len(scenario.states) - scenario.num_steps)
    part = ["", "", "attn|attention", ""][index % 4]

    def choose(context: FaultContext) -> State:
        base, merged = scenario.states[0], scenario.states[context.version]
        if not part:
            return base
        return {key: base[key] if re.search(part, key) else value for key, value in merged.items()}

    believes = {"adapters": ["default"]} if index % 5 != 4 else {}
    variant = "attention's part not merged" if part else "not merged"
    return Fault(
        code="adapter", variant=variant, strength=scenario.first_version, rollout=_weighed(choose), belief=believes
    )


def quantised(scenario: Any, index: int, chance: random.Random) -> Fault:
    """The engine's matrices are rounded to few bits."""
    kinds = [
        ("int8", "channel"), ("int4", "group"), ("fp8", "tensor"), ("int8", "tensor"), ("fp8", "channel"),
        ("int4", "channel"), ("int6", "channel"),
    ]  # fmt: skip
    kind, by = kinds[index % len(kinds)]
    only = ["", "mlp|block_sparse|experts", ""][index % 3]

    def choose(context: FaultContext) -> State:
        return quantise(context.scenario.states[context.version], kind, by, only)

    believes = {"quantization": kind} if chance.random() < 0.4 else {}
    return Fault(
        code="quantised", variant=f"{kind} by {by}{' of the MLPs' if only else ''}", strength=kind,
        rollout=_weighed(choose), belief=believes,
    )  # fmt: skip


def quantise(state: State, kind: str, by: str, only: str = "") -> State:
    """Weights as a quantised engine has them; embeddings, output matrix, norms and routers stay as they are."""
    keep = r"embed|lm_head|norm|ln_|wte|wpe|gate\.weight|bias"
    return {
        name: value
        if value.ndim < 2 or re.search(keep, name) or not re.search(only, name)
        else _rounded(value, kind, by)
        for name, value in state.items()
    }


def _rounded(weight: Tensor, kind: str, by: str) -> Tensor:
    rows = weight.reshape(-1, weight.shape[-1])
    if by == "group":
        rows = rows.reshape(-1, 32) if rows.shape[-1] % 32 == 0 else rows
    if by == "tensor":
        rows = rows.reshape(1, -1)
    largest = rows.abs().amax(1, keepdim=True).clamp(min=1e-12)
    if kind == "fp8":
        scale = largest / torch.finfo(torch.float8_e4m3fn).max
        return ((rows / scale).to(torch.float8_e4m3fn).float() * scale).reshape(weight.shape)
    scale = largest / (2 ** (int(kind.removeprefix("int")) - 1) - 1)
    return ((rows / scale).round() * scale).reshape(weight.shape)


def subset(scenario: Any, index: int, chance: random.Random) -> Fault:
    """Only some engine, group, or range of steps carries a fault."""
    where = ["replica", "groups", "steps"][index % 3]
    what = ["stale weights", "temperature", "dtype", "quantised"][(index // 3 + index) % 4]
    scenario.num_steps = max(scenario.num_steps, 6 if where == "steps" else 3)
    scenario.num_groups = max(scenario.num_groups, 4)
    behind, tempered = chance.choice([2, 4, 6]), round(1.0 + spread(index, 0.03, 0.3, chance), 3)
    scenario.first_version = min(max(scenario.first_version, behind), len(scenario.states) - scenario.num_steps)
    scenario.num_prompts = scenario.num_prompts or (8 if where == "groups" else 0)
    replicas = chance.choice([2, 3, 4])
    chosen = {
        f"prompt-{number}"
        for number in chance.sample(range(scenario.num_prompts or 1), max(1, scenario.num_prompts // 4))
    }
    first = chance.randrange(scenario.num_steps)
    last = min(scenario.num_steps - 1, first + chance.randrange(2))
    bad = chance.randrange(replicas)

    def carries(context: FaultContext) -> np.ndarray:
        if where == "replica":
            return replica_of(len(context.groups), replicas) == bad
        if where == "groups":
            return np.array([name in chosen for name in context.groups])
        return np.full(len(context.groups), first <= context.index <= last)

    def rollout(side: Side, context: FaultContext) -> Side:
        if what == "stale weights":
            return replace(side, state=_back(context, behind))
        if what == "temperature":
            heated = scenario.sampling.temperature * tempered
            return replace(side, head=replace(side.head, sampling=Sampling(temperature=heated)))
        if what == "dtype":
            return replace(side, dtype=torch.bfloat16)
        return replace(side, state=quantise(side.state, "int4", "channel"))

    if what == "dtype":
        scenario.numerics = "fp32"
    belief = {"replicas": replicas} if where == "replica" else {}
    strength = {"stale weights": behind, "temperature": tempered}.get(what, what)
    return Fault(
        code="subset", variant=f"{what} by {where}", strength=strength, rollout=rollout, carries=carries, belief=belief
    )


def replica_of(rows: int, replicas: int) -> np.ndarray:
    """[rows] which engine sampled each sequence: they take turns."""
    return np.arange(rows) % replicas
