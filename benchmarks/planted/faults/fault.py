"""A fault: its effect on engine and trainer, on which sequences, and on what is recorded."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

if TYPE_CHECKING:
    from scenarios import Scenario
    from sides import Side
    from step import RecordedStep


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultContext:
    """The step at which a fault steps."""

    scenario: Scenario
    index: int
    """Steps before this one."""
    version: int
    """Policy version of the trainer's weights."""
    groups: list[str]
    """[B] name of each sequence's prompt."""
    prompts: Tensor
    """[B, P] prompts of the sequences to change."""
    chance: random.Random


def _same(side: Side, context: FaultContext) -> Side:
    return side


def _everyone(context: FaultContext) -> np.ndarray:
    return np.ones(len(context.groups), bool)


def _nothing(step: RecordedStep, context: FaultContext) -> None:
    return None


@dataclass(slots=True, kw_only=True)
class Fault:
    """A fault that is planted, or none."""

    code: str
    variant: str
    strength: Any = None
    """Size of the fault, in its own units."""
    rollout: Callable[[Side, FaultContext], Side] = _same
    train: Callable[[Side, FaultContext], Side] = _same
    carries: Callable[[FaultContext], np.ndarray] = _everyone
    """[B] bool: the sequences that have it."""
    record: Callable[[RecordedStep, FaultContext], None] = _nothing
    """Changes the step's values before they are recorded."""
    belief: dict[str, Any] = field(default_factory=dict)
    """Contract fields in which the frameworks differ from the scenario: see contracts."""

    @classmethod
    def none(cls) -> Fault:
        return cls(code="rounding", variant="none")


def spread(index: int, low: float, high: float, chance: random.Random) -> float:
    """A strength between two bounds, evenly spaced in its logarithm over the indices, a little off by chance."""
    place = (index * 0.6180339887 + 0.15 + 0.1 * chance.random()) % 1.0
    return float(low * (high / low) ** place)
