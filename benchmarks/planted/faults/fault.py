"""A fault: what it does to either side, to which sequences, and to what is recorded."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

if TYPE_CHECKING:
    from act import Act
    from scenes import Scene
    from sides import Side


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The step at which a fault acts."""

    scene: Scene
    index: int
    """Steps before this one."""
    version: int
    """The trainer's weights."""
    groups: list[str]
    """[B] names of the prompts."""
    prompts: Tensor
    """[B, P] of the sequences in question."""
    chance: random.Random


def _same(side: Side, moment: Moment) -> Side:
    return side


def _everyone(moment: Moment) -> np.ndarray:
    return np.ones(len(moment.groups), bool)


def _nothing(act: Act, moment: Moment) -> None:
    return None


@dataclass(slots=True, kw_only=True)
class Fault:
    """A fault that is planted, or none."""

    code: str
    variant: str
    strength: Any = None
    """What makes it strong, in words of its own."""
    rollout: Callable[[Side, Moment], Side] = _same
    train: Callable[[Side, Moment], Side] = _same
    carries: Callable[[Moment], np.ndarray] = _everyone
    """[B] bool: the sequences that it befalls."""
    record: Callable[[Act, Moment], None] = _nothing
    """What it does to the values on their way into the record."""
    belief: dict[str, Any] = field(default_factory=dict)
    """What the frameworks believe, where it is not what the scene says: see contracts."""

    @classmethod
    def none(cls) -> Fault:
        return cls(code="rounding", variant="none")


def spread(index: int, low: float, high: float, chance: random.Random) -> float:
    """A strength between two bounds, evenly spaced in its logarithm over the indices, a little off by chance."""
    place = (index * 0.6180339887 + 0.15 + 0.1 * chance.random()) % 1.0
    return float(low * (high / low) ** place)
