"""The remaining work in a replay, and its expected duration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from ..schemas.results import Table


@dataclass(slots=True, kw_only=True)
class ArmPlan:
    """The work that remains to be done under one arm."""

    arm: str
    num_steps: int = 0
    """Number of steps with sequences that have no score yet."""
    num_sequences: int = 0
    """Number of sequences that have no score yet."""
    num_tokens: int = 0
    """Number of prompt and response tokens that run through the model, including those of rows that only share a
    forward pass with a missing sequence."""
    num_versions: int = 0
    """Number of times that weights are loaded: once per change of policy version."""
    tokens_per_s: float | None = None
    """Tokens per second, measured on the first rows; None until measured."""
    load_s: float | None = None
    """Measured seconds to load the weights of one policy version; None until measured."""

    @property
    def seconds(self) -> float | None:
        """Estimated time in a single process, seconds; None until the pace is known."""
        if not self.num_tokens:
            return 0.0
        if self.tokens_per_s is None:
            return None
        return self.num_tokens / self.tokens_per_s + self.num_versions * (self.load_s or 0.0)


class ReplayPlan(list[ArmPlan], Table):
    """The work that remains to be done under each arm."""

    _text = "tim_trace.analysis.replay_text:plan_text"

    @property
    def seconds(self) -> float | None:
        """Estimated time for all arms, seconds; None until the pace is known."""
        known = [arm.seconds for arm in self]
        return None if None in known else sum(seconds or 0.0 for seconds in known)

    def _table(self) -> tuple[Sequence[str], Sequence[Sequence[Any]]]:
        names = [field.name for field in fields(ArmPlan)] + ["seconds"]
        return names, [[getattr(arm, name) for name in names] for arm in self]
