"""Faults of a mixture of experts: routers that see rounded inputs choose other experts for some tokens."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .fault import Fault, Moment


def router_flips(scene: Any, index: int, chance: random.Random) -> Fault:
    """The engine's routers see their inputs in fewer bits than the trainer's."""
    scene.numerics = "fp32"
    bits = [7, 4, 5, 3, 6, 7, 2, 8, 5, 4, 7, 10][index % 12]

    def change(side: Any, moment: Moment) -> Any:
        return replace(side, router=lambda hidden: _fewer_bits(hidden, bits))

    def record(act: Any, moment: Moment) -> None:
        act.affected &= act.flipped

    on_train = index % 4 == 3
    return Fault(
        code="router_flips", variant=f"{'trainer' if on_train else 'engine'} rounds", strength=f"{bits} bits", record=record,
        **{"train" if on_train else "rollout": change},
    )  # fmt: skip


def _fewer_bits(hidden: Tensor, bits: int) -> Tensor:
    """Round to a mantissa of so many bits: 7 is bfloat16's."""
    fraction, exponent = torch.frexp(hidden.float())
    return torch.ldexp((fraction * 2 ** (bits + 1)).round() / 2 ** (bits + 1), exponent).to(hidden.dtype)
