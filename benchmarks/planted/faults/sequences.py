"""Faults that begin inside a sequence: weights swapped, stale prefixes, positions and caches that go wrong."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from sides import Side
from torch import Tensor

from .fault import Fault, FaultContext, spread


def change_inside_sequence(scenario: Any, index: int, chance: random.Random) -> Fault:
    """Weights are swapped while sequences are sampled, or the prompt's cache is from before the swap."""
    behind = [1, 2, 4, 8, 3, 6][index % 6]
    scenario.first_version = min(max(scenario.first_version, behind), max(0, len(scenario.states) - scenario.num_steps))
    if index % 3 == 2:
        return _stale_prefix(scenario, index, behind)
    claims_start = index % 2 == 1

    def rollout(side: Side, context: FaultContext) -> Side:
        old = scenario.states[max(0, context.version - behind)]
        at = _swap_times(scenario, len(context.prompts), chance)
        return replace(side, state=old, swap=(side.state, at))

    def record(step: Any, context: FaultContext) -> None:
        step.affected &= (step.rollout - step.clean_rollout).abs() > 0

    # The engine keeps its cache over the swap, so that tokens after it are off as well, by less.
    return Fault(
        code="change_inside_sequence", variant="weights swapped in flight", strength=behind, rollout=rollout, record=record,
        belief={"policy_version": None} if claims_start and index % 4 == 1 else {},
    )  # fmt: skip


def _swap_times(scenario: Any, rows: int, chance: random.Random) -> Tensor:
    """[B] response token at which each row sees the new weights: rows began at different times."""
    typical = max(4, scenario.max_tokens // 3)
    context = chance.uniform(0.3, 1.0) * typical
    return torch.tensor([max(0, int(context - chance.uniform(0.0, 1.0) * typical)) for _ in range(rows)])


def _stale_prefix(scenario: Any, index: int, behind: int) -> Fault:
    """Keys and values of the prompt come from a cache that older weights filled."""
    recurring = index % 2 == 0
    if recurring:
        scenario.num_prompts = 2 * scenario.num_groups
        scenario.num_steps = max(scenario.num_steps, 4)
        scenario.first_version = 0
    known: dict[str, int] = {}

    def carries(context: FaultContext) -> np.ndarray:
        if not recurring:
            return np.ones(len(context.groups), bool)
        for name in context.groups:
            known.setdefault(name, context.version)
        return np.array([known[name] < context.version for name in context.groups])

    def rollout(side: Side, context: FaultContext) -> Side:
        # Without recurring prompts, it is the text that all prompts begin with whose cache is old.
        length = context.prompts.shape[1] - 1 if recurring else context.prompts.shape[1] // 2
        first = min(known.values()) if recurring else max(0, context.version - behind)
        return replace(side, prefix=(scenario.states[first], length))

    variant = "stale cache of recurring prompts" if recurring else "stale cache of the common prefix"
    return Fault(code="change_inside_sequence", variant=variant, strength=behind, rollout=rollout, carries=carries)


def position_onset(scenario: Any, index: int, chance: random.Random) -> Fault:
    """From one absolute position on, one side's positions or cache are wrong."""
    prompt, response = scenario.model.language.typical_lengths()
    onset = prompt + max(4, int(min(response, scenario.max_tokens) * chance.uniform(0.2, 0.6)))
    learned = scenario.model.recipe.architecture == "gpt2"
    kinds = ["clamped", "stretched", "window", "rounded cache", "lost block", "off by one"]
    kind = kinds[index % len(kinds)]
    if learned and kind == "stretched":
        kind = "clamped"
    strength = spread(index, 1.02, 2.0, chance) if kind == "stretched" else onset
    on_train = kind in ("clamped", "stretched", "window") and (index // 6) % 2 == 1

    def change(side: Side, context: FaultContext) -> Side:
        if kind == "window":
            return replace(side, window=onset)
        if kind in ("rounded cache", "lost block"):
            return replace(side, cache=_caches(kind, onset))
        return replace(side, positions=_positions(kind, onset, strength))

    def record(step: Any, context: FaultContext) -> None:
        absolute = step.prompts.shape[1] + torch.arange(step.ids.shape[1]) - 1
        step.affected &= absolute[None] >= onset

    return Fault(
        code="position_onset", variant=f"{kind} of the {'trainer' if on_train else 'engine'}",
        strength={"onset": onset, "by": strength}, record=record, **{"train" if on_train else "rollout": change},
    )  # fmt: skip


def _positions(kind: str, onset: int, factor: float) -> Callable[[Tensor], Tensor]:
    def told(positions: Tensor) -> Tensor:
        if kind == "clamped":
            return positions.clamp(max=onset)
        if kind == "off by one":
            return positions + (positions >= onset).long()
        return torch.where(positions >= onset, onset + (positions - onset) / factor, positions.float())

    return told


def _caches(kind: str, onset: int) -> Callable[[Tensor, int], Tensor]:
    """A cache that rounds to eight bits, or that loses a block of eight tokens, from a position on."""

    def rounded(held: Tensor, start: int) -> Tensor:
        new = max(start, onset)
        if held.shape[2] <= new:
            return held
        late = held[:, :, new:].to(torch.float8_e4m3fn).to(held.dtype)
        return torch.cat([held[:, :, :new], late], 2)

    def lost(held: Tensor, start: int) -> Tensor:
        if not start <= onset < held.shape[2]:
            return held
        return torch.cat(
            [held[:, :, : onset - 8], torch.zeros_like(held[:, :, onset - 8 : onset]), held[:, :, onset:]], 2
        )

    return rounded if kind == "rounded cache" else lost
