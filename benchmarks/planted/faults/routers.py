"""Faults of a mixture of experts: routers that see rounded inputs choose other experts for some tokens."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from sides import fewer_bits

from .fault import Fault, FaultContext


def router_flips(scenario: Any, index: int, chance: random.Random) -> Fault:
    """The engine's routers see their inputs in fewer bits than the trainer's."""
    if index % 4 == 1:
        return _of_low_precision(scenario, index)
    scenario.numerics = "fp32"
    bits = [7, 4, 5, 3, 6, 7, 2, 8, 5, 4, 7, 10][index % 12]

    def change(side: Any, context: FaultContext) -> Any:
        return replace(side, router=lambda hidden: fewer_bits(hidden, bits))

    def record(step: Any, context: FaultContext) -> None:
        step.affected &= step.flipped

    on_train = index % 4 == 3
    return Fault(
        code="router_flips", variant=f"{'trainer' if on_train else 'engine'} rounds", strength=f"{bits} bits", record=record,
        **{"train" if on_train else "rollout": change},
    )  # fmt: skip


def _of_low_precision(scenario: Any, index: int) -> Fault:
    """The engine's own dtype flips them; what is left without the fault is an engine that replays the trainer's choices."""
    scenario.numerics = ["bf16-fp32", "fp16-fp32", "bf16-autocast"][(index // 4) % 3]
    scenario.replayed_routing = True

    def record(step: Any, context: FaultContext) -> None:
        step.affected &= step.flipped

    return Fault(code="router_flips", variant="dtype of the engine", strength=scenario.numerics, record=record)
