"""Faults between logits and recorded log-probabilities: temperature, truncation, base, padded rows, precision."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import torch
from heads import Sampling

from .fault import Fault, FaultContext, spread


def _headed(**changes: Any) -> Any:
    """A change of one side's head."""
    return lambda side, context: replace(side, head=replace(side.head, **changes))


def temperature(scenario: Any, index: int, chance: random.Random) -> Fault:
    """One side's logits are divided by another temperature than the other's."""
    near = 1.0 + math.copysign(spread(index, 0.008, 0.5, chance), (-1) ** (index // 2) * 0.6 - 0.1)
    value = round(min(max(near, 0.5), 1.35), 3)
    kind = index % 4
    if kind == 3:
        other = round(1.0 / value if value > 1 else value, 3)
        return Fault(
            code="temperature", variant="the engine divides a second time", strength=other,
            rollout=_headed(sampling=Sampling(temperature=scenario.sampling.temperature * other)),
        )  # fmt: skip
    scenario.sampling = Sampling(temperature=value)
    if kind == 0:
        return Fault(
            code="temperature", variant="raw logprobs of the engine", strength=value, rollout=_headed(sampling=Sampling()),
            belief={"logprobs_mode": "raw_logprobs"},
        )  # fmt: skip
    if kind == 1:
        return Fault(
            code="temperature", variant="the trainer's setting is 1", strength=value, train=_headed(sampling=Sampling()),
            belief={"trainer_temperature": 1.0},
        )  # fmt: skip
    return Fault(
        code="temperature",
        variant="the trainer ignores its setting",
        strength=value,
        train=_headed(sampling=Sampling()),
    )


def truncation(scenario: Any, index: int, chance: random.Random) -> Fault:
    """The engine renormalises over what truncation kept, the trainer over the whole vocabulary."""
    kind = index % 3
    tempered = 1.0 if chance.random() < 0.7 else round(chance.uniform(0.7, 1.1), 2)
    if kind == 0:
        setting = {"top_p": round(1.0 - spread(index, 0.002, 0.3, chance), 4)}
    elif kind == 1:
        size = scenario.model.language.size
        setting = {"top_k": max(2, min(int(spread(index, 3, 60, chance)), size - 1))}
    else:
        setting = {"min_p": round(spread(index, 0.003, 0.2, chance), 4)}
    if index % 7 == 6:
        setting = {"top_p": 0.9, "top_k": 20}
    scenario.sampling = Sampling(temperature=tempered, **setting)
    return Fault(
        code="truncation", variant="+".join(setting), strength=setting, rollout=_headed(sampling=scenario.sampling),
    )  # fmt: skip


def log_base(scenario: Any, index: int, chance: random.Random) -> Fault:
    """Something else than the natural logarithm of the probability."""
    kinds = {
        "log2": lambda value: value / math.log(2),
        "log10": lambda value: value / math.log(10),
        "probability": lambda value: value.exp(),
        "negative": lambda value: -value,
    }
    name = list(kinds)[index % 4]
    on_train = (index // 4) % 2 == 1

    def record(step: Any, context: FaultContext) -> None:
        side = "train" if on_train else "rollout"
        setattr(step, side, kinds[name](getattr(step, side)).where(step.tokens, torch.tensor(0.0)))

    return Fault(
        code="log_base", variant=f"{name} of the {'trainer' if on_train else 'engine'}", strength=name, record=record
    )


def padded_vocabulary(scenario: Any, index: int, chance: random.Random) -> Fault:
    """One side's log-softmax runs over the rows that pad the output matrix, too."""
    size, hidden = scenario.model.language.size, scenario.model.recipe.hidden
    multiple = chance.choice([64, 128, 256, 512])
    rows = (-size) % multiple or multiple
    if index % 3 == 2:
        rows = max(1, int(spread(index, 1, 64, chance)))
    scale = [0.0, 0.0, spread(index, 0.005, 0.1, chance)][index % 3]
    generator = torch.Generator().manual_seed(scenario.seed)
    change = _headed(padded_rows=scale * torch.randn(rows, hidden, generator=generator))
    on_train = (index // 3) % 2 == 1
    return Fault(
        code="padded_vocabulary", strength={"rows": rows, "scale": scale},
        variant=f"{'random' if scale else 'zero'} rows of the {'trainer' if on_train else 'engine'}",
        **{"train" if on_train else "rollout": change},
    )  # fmt: skip


def low_precision_head(scenario: Any, index: int, chance: random.Random) -> Fault:
    """The output matrix product or the log-softmax of one side is rounded, all else is float32."""
    scenario.numerics = "fp32"
    changes = [
        ("matmul", torch.bfloat16), ("softmax", torch.bfloat16), ("matmul", torch.float16), ("softmax", torch.float16),
    ]  # fmt: skip
    what, dtype = changes[index % 4]
    on_train = (index // 2) % 3 == 2
    name = str(dtype).removeprefix("torch.")
    return Fault(
        code="low_precision_head", variant=f"{what} of the {'trainer' if on_train else 'engine'}", strength=name,
        **{"train" if on_train else "rollout": _headed(**{what: dtype})},
    )  # fmt: skip
