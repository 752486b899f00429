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

from .fault import Fault, Moment, spread


def _weighed(choose: Any) -> Any:
    """A change of one side's weights: choose(moment) -> state."""
    return lambda side, moment: replace(side, state=choose(moment))


def _back(moment: Moment, count: int) -> State:
    return moment.scene.states[max(0, moment.version - count)]


def stale_weights(scene: Any, index: int, chance: random.Random) -> Fault:
    """The engine is some optimizer updates behind; the record says otherwise."""
    behind = [1, 2, 4, 1, 8, 3, 2, 6, 1, 5, 2, 1][index % 12]
    scene.num_steps = min(scene.num_steps, len(scene.states) - behind)
    scene.first_version = max(scene.first_version, behind)
    scene.first_version = min(scene.first_version, len(scene.states) - scene.num_steps)
    if index % 6 == 5:
        frozen = scene.version(0) - 1
        return Fault(
            code="stale_weights", variant="synchronisation has stopped", strength=frozen,
            rollout=_weighed(lambda moment: scene.states[max(0, frozen)]),
        )  # fmt: skip
    if index % 6 == 4:
        return _scored_too_late(scene, behind)
    belief: dict[str, Any] = {}
    if index % 5 == 3:
        belief = {"policy_version": None}
    if index % 7 == 6:
        belief = {"sampling_version_behind": behind}
    variant = "versions behind" + (", and says so" if "sampling_version_behind" in belief else "")
    return Fault(
        code="stale_weights", variant=variant, strength=behind, belief=belief,
        rollout=_weighed(lambda moment: _back(moment, behind)),
    )  # fmt: skip


def _scored_too_late(scene: Any, ahead: int) -> Fault:
    """The trainer scores once it has updated its weights."""
    scene.first_version = min(scene.first_version, len(scene.states) - scene.num_steps - ahead)
    return Fault(
        code="stale_weights", variant="the trainer scores after its update", strength=ahead,
        train=_weighed(lambda moment: scene.states[min(moment.version + ahead, len(scene.states) - 1)]),
    )  # fmt: skip


_MODULES = {
    "head and embeddings": r"embed|lm_head|wte|embed_out",
    "one layer": r"layers?\.1\.|\bh\.1\.",
    "norms": r"norm|ln_",
    "attention": r"attn|attention",
    "mlp": r"mlp|block_sparse|experts|gate",
    "first layer": r"layers?\.0\.|\bh\.0\.",
}


def partial_sync(scene: Any, index: int, chance: random.Random) -> Fault:
    """Some modules of the engine stay at an older version."""
    name = list(_MODULES)[index % len(_MODULES)]
    behind = [1, 99, 2, 4, 99, 99][(index * 5 + index // 6) % 6]
    scene.first_version = max(scene.first_version, min(3, len(scene.states) - scene.num_steps))

    def choose(moment: Moment) -> State:
        new, old = moment.scene.states[moment.version], _back(moment, behind)
        return {key: old[key] if re.search(_MODULES[name], key) else value for key, value in new.items()}

    variant = f"{name} {'never updated' if behind == 99 else 'behind'}"
    return Fault(code="partial_sync", variant=variant, strength=behind, rollout=_weighed(choose))


def adapter(scene: Any, index: int, chance: random.Random) -> Fault:
    """The trainer has a LoRA adapter that the engine lacks, wholly or in part."""
    scene.states = scene.world.adapters
    scene.num_steps = min(scene.num_steps, len(scene.states) - 1)
    scene.first_version = 1 + chance.randrange(len(scene.states) - scene.num_steps)
    part = ["", "", "attn|attention", ""][index % 4]

    def choose(moment: Moment) -> State:
        base, merged = scene.states[0], scene.states[moment.version]
        if not part:
            return base
        return {key: base[key] if re.search(part, key) else value for key, value in merged.items()}

    believes = {"adapters": ["default"]} if index % 5 != 4 else {}
    variant = "attention's part not merged" if part else "not merged"
    return Fault(
        code="adapter", variant=variant, strength=scene.first_version, rollout=_weighed(choose), belief=believes
    )


def quantised(scene: Any, index: int, chance: random.Random) -> Fault:
    """The engine's matrices are rounded to few bits."""
    kinds = [
        ("int8", "channel"), ("int4", "group"), ("fp8", "tensor"), ("int8", "tensor"), ("fp8", "channel"),
        ("int4", "channel"), ("int6", "channel"),
    ]  # fmt: skip
    kind, by = kinds[index % len(kinds)]
    only = ["", "mlp|block_sparse|experts", ""][index % 3]

    def choose(moment: Moment) -> State:
        return quantise(moment.scene.states[moment.version], kind, by, only)

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


def subset(scene: Any, index: int, chance: random.Random) -> Fault:
    """Only some engine, group, or range of steps carries a fault."""
    where = ["replica", "groups", "steps"][index % 3]
    what = ["stale weights", "temperature", "dtype", "quantised"][(index // 3 + index) % 4]
    scene.num_steps = max(scene.num_steps, 6 if where == "steps" else 3)
    scene.num_groups = max(scene.num_groups, 4)
    behind, tempered = chance.choice([2, 4, 6]), round(1.0 + spread(index, 0.03, 0.3, chance), 3)
    scene.first_version = min(max(scene.first_version, behind), len(scene.states) - scene.num_steps)
    scene.num_prompts = scene.num_prompts or (8 if where == "groups" else 0)
    replicas = chance.choice([2, 3, 4])
    chosen = {
        f"prompt-{number}" for number in chance.sample(range(scene.num_prompts or 1), max(1, scene.num_prompts // 4))
    }
    first = chance.randrange(scene.num_steps)
    last = min(scene.num_steps - 1, first + chance.randrange(2))
    bad = chance.randrange(replicas)

    def carries(moment: Moment) -> np.ndarray:
        if where == "replica":
            return replica_of(len(moment.groups), replicas) == bad
        if where == "groups":
            return np.array([name in chosen for name in moment.groups])
        return np.full(len(moment.groups), first <= moment.index <= last)

    def rollout(side: Side, moment: Moment) -> Side:
        if what == "stale weights":
            return replace(side, state=_back(moment, behind))
        if what == "temperature":
            heated = scene.sampling.temperature * tempered
            return replace(side, head=replace(side.head, sampling=Sampling(temperature=heated)))
        if what == "dtype":
            return replace(side, dtype=torch.bfloat16)
        return replace(side, state=quantise(side.state, "int4", "channel"))

    if what == "dtype":
        scene.numerics = "fp32"
    belief = {"replicas": replicas} if where == "replica" else {}
    strength = {"stale weights": behind, "temperature": tempered}.get(what, what)
    return Fault(
        code="subset", variant=f"{what} by {where}", strength=strength, rollout=rollout, carries=carries, belief=belief
    )


def replica_of(rows: int, replicas: int) -> np.ndarray:
    """[rows] which engine sampled each sequence: they take turns."""
    return np.arange(rows) % replicas
