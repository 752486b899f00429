"""Faults of the record: shifts, pairing, placeholders, copies."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from .fault import Fault, FaultContext, spread


def shift(scenario: Any, index: int, chance: random.Random) -> Fault:
    """One side's values stand one token too early or too late."""
    by = [1, -1][index % 2]
    on_train = (index // 2) % 2 == 1
    filler = [0.0, float("nan"), None][(index // 4) % 3]
    if index % 6 == 5:
        return _shifted_after_a_tool(scenario, by)

    def record(step: Any, context: FaultContext) -> None:
        name = "train" if on_train else "rollout"
        values, known = _shifted(getattr(step, name), step.lengths, by, filler)
        setattr(step, name, values)
        setattr(step, f"{name}_known", getattr(step, f"{name}_known") & known)
        if filler is None:
            step.affected &= known

    variant = f"{'trainer' if on_train else 'engine'} one {'later' if by > 0 else 'earlier'}"
    return Fault(code="shift", variant=variant, strength=by, record=record)


def _shifted_after_a_tool(scenario: Any, by: int) -> Fault:
    """The engine's values of what follows a tool's output stand one token off: the turns were joined wrongly."""
    scenario.tool_words = 4

    def record(step: Any, context: FaultContext) -> None:
        after = (step.tool.cumsum(1) == step.tool.sum(1, keepdim=True)) & step.tool.any(1, keepdim=True) & ~step.tool
        after &= step.tokens
        moved, _ = _shifted(step.rollout, step.lengths, by, 0.0)
        step.rollout = torch.where(after, moved, step.rollout)
        step.affected &= after

    return Fault(code="shift", variant="engine after a tool's output", strength=by, record=record)


def _shifted(values: Tensor, lengths: Tensor, by: int, filler: float | None) -> tuple[Tensor, Tensor]:
    """[B, T] values one place on, and which places have one; the gap holds the filler."""
    places = torch.arange(values.shape[1])[None].expand(values.shape)
    source = places - by
    there = (source >= 0) & (source < lengths[:, None])
    moved = values.gather(1, source.clamp(0, values.shape[1] - 1))
    empty = torch.tensor(0.0 if filler is None else filler)
    inside = places < lengths[:, None]
    return torch.where(there, moved, empty).where(inside, torch.tensor(0.0)), there | torch.tensor(filler is not None)


def row_pairing(scenario: Any, index: int, chance: random.Random) -> Fault:
    """One side's rows belong to other sequences."""
    kinds = [
        "all shuffled", "one on", "some swapped", "shuffled inside groups", "two swapped", "reversed", "half rolled",
        "step before",
    ]  # fmt: skip
    kind = kinds[index % len(kinds)]
    if kind == "step before":
        return _of_the_step_before(scenario)
    share = spread(index, 0.1, 0.6, chance)
    on_train = (index // 7 + index // 2) % 2 == 1

    def record(step: Any, context: FaultContext) -> None:
        order = _order(kind, len(step.ids), context.scenario.group_size, share, chance)
        name = "train" if on_train else "rollout"
        setattr(step, name, getattr(step, name)[order].where(step.tokens, torch.tensor(0.0)))
        step.affected &= (order != torch.arange(len(order)))[:, None]

    return Fault(
        code="row_pairing",
        variant=f"{kind}, {'trainer' if on_train else 'engine'}",
        strength=round(share, 3),
        record=record,
    )


def _of_the_step_before(scenario: Any) -> Fault:
    """A buffer still holds the engine's values of the step before."""
    scenario.num_steps = max(scenario.num_steps, 3)
    held: list[Tensor] = []

    def record(step: Any, context: FaultContext) -> None:
        now = step.rollout
        if held:
            width = now.shape[1]
            old = torch.nn.functional.pad(held[0], (0, max(0, width - held[0].shape[1])))[:, :width]
            step.rollout = old.where(step.tokens, torch.tensor(0.0))
        else:
            step.affected[:] = False
        held[:] = [now]

    return Fault(code="row_pairing", variant="values of the step before, engine", strength=1, record=record)


def _order(kind: str, rows: int, group: int, share: float, chance: random.Random) -> Tensor:
    order = list(range(rows))
    if kind == "all shuffled":
        chance.shuffle(order)
    elif kind == "one on":
        order = order[1:] + order[:1]
    elif kind == "reversed":
        order.reverse()
    elif kind == "half rolled":
        half = rows // 2
        order = order[:half] + order[half + 1 :] + order[half : half + 1]
    elif kind == "shuffled inside groups":
        for start in range(0, rows, group):
            part = order[start : start + group]
            chance.shuffle(part)
            order[start : start + group] = part
    else:
        count = 2 if kind == "two swapped" else max(2, int(share * rows))
        chosen = chance.sample(order, count)
        for row, other in zip(chosen, chosen[1:] + chosen[:1], strict=True):
            order[row] = other
    return torch.tensor(order)


def placeholders(scenario: Any, index: int, chance: random.Random) -> Fault:
    """Some values are no log-probabilities at all."""
    value = [0.0, -9999.0, 0.0, -100.0, 0.0, -1.0, 1e-8 * -1, 0.0][index % 8]
    where = ["last token", "rows", "first part", "tokens", "rows", "tokens", "first token", "tail"][(index * 3) % 8]
    share = spread(index, 0.02, 0.6, chance)
    name = "train" if index % 7 == 6 else "rollout"

    def record(step: Any, context: FaultContext) -> None:
        holes = _holes(where, step, share, chance) & step.tokens
        setattr(step, name, getattr(step, name).masked_fill(holes, value))
        step.affected = holes

    return Fault(code="placeholders", variant=f"{value:g} for {where}, {name}", strength=round(share, 3), record=record)


def _holes(where: str, step: Any, share: float, chance: random.Random) -> Tensor:
    """[B, T] bool"""
    places = torch.arange(step.ids.shape[1])[None]
    lengths = step.lengths[:, None]
    some = torch.tensor([chance.random() < share for _ in range(len(step.ids))])
    some[chance.randrange(len(some))] = True
    if where == "last token":
        return places == lengths - 1
    if where == "first token":
        return (places == 0).expand(step.ids.shape)
    if where == "rows":
        return some[:, None].expand(step.ids.shape)
    if where == "first part":
        ends = torch.tensor([chance.uniform(0.2, 0.8) for _ in range(len(step.ids))])[:, None] * lengths
        return some[:, None] & (places < ends)
    if where == "tail":
        starts = torch.tensor([chance.uniform(0.3, 0.9) for _ in range(len(step.ids))])[:, None] * lengths
        return some[:, None] & (places >= starts)
    generator = torch.Generator().manual_seed(chance.randrange(1 << 30))
    return torch.rand(step.ids.shape, generator=generator) < share


def copies(scenario: Any, index: int, chance: random.Random) -> Fault:
    """The trainer's values are the engine's, copied."""
    since = chance.randrange(scenario.num_steps) if index % 4 == 3 else 0

    def record(step: Any, context: FaultContext) -> None:
        if step.index >= since:
            step.train = step.rollout.clone()
        else:
            step.affected[:] = False

    variant = "from a step on" if since else "everywhere"
    return Fault(code="copies", variant=variant, strength=since, record=record)
