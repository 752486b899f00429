"""What one sequence's run through both executions gave: all that a location needs of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ...tracer.located.results import CarriedError, Router
from .reference import Judged

Apart = tuple[float, float]
"""Sums of squares of the difference, and of a's."""


@dataclass(slots=True, kw_only=True)
class JudgedSequence:
    """One sequence, each of its operators held against float64."""

    seq_id: str
    logprobs: dict[str, list[float]] = field(default_factory=dict)
    """Side -> [T] of its response, nats."""
    judged: list[tuple[str, Judged]] = field(default_factory=list)
    """Side, and an operator that is looked at."""
    carried: list[CarriedError] = field(default_factory=list)
    apart: dict[str, tuple[Apart, Apart]] = field(default_factory=dict)
    """Operator -> how far apart both executions are before and behind it."""
    unseen: set[str] = field(default_factory=set)
    """Operators that one execution alone has."""
    unjudged: dict[str, str] = field(default_factory=dict)
    """Operator, or what else could not be done -> why."""
    routers: list[Router] = field(default_factory=list)
    kinds: set[str] = field(default_factory=set)
    """Of all operators that could be judged."""
    is_whole: bool = True
    """Whether the engines among the executions took it in one forward."""

    def values(self, side: str) -> np.ndarray:
        """[T] float64 log-probabilities of one execution."""
        return np.array(self.logprobs[side], np.float64)
