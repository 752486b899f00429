"""What a replay found."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from math import nan
from typing import Any

from ..schemas.results import Table
from .backends.trusted import REFUSED
from .plan import ReplayPlan
from .sample import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedStep:
    """One step under one arm, next to the pass that is replayed, `train` where it was recorded: d = replay - train, nats.

    Where the identity arm was refused it has no tokens, and d is NaN.
    """

    arm: str
    step: int
    num_tokens: int
    num_equal: int
    """Tokens with the same bits."""
    mean_abs_d: float
    max_abs_d: float
    identity_held: bool
    """Whether replaying this step as recorded gave every bit back: only then is the arm's d the arm's own."""
    not_held: str | None = None
    """Why it did not: `refused` (the recording does not run here), a code of `trusted.WHY` (something else ran in the place of
    what was recorded), `conditions` (other settings, versions or hardware) or `unexplained`; None where it held."""
    differs: tuple[str, ...] = ()
    """For the identity arm where it did not hold: contract fields that differ, `field: recorded, now`; or why it was refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedArm:
    """An arm over all steps that were replayed; d = replay - train, nats."""

    arm: str
    num_steps: int
    num_tokens: int
    share_equal: float
    """Share of tokens with the recorded bits."""
    mean_abs_d: float
    max_abs_d: float
    identity_held: int
    """Steps in which replaying as recorded gave every bit back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSums:
    """What one group of a sampled step adds to an arm's numbers; d = replay - train, nats."""

    arm: str
    step: int
    weight: float
    """Groups of the step that it stands for."""
    num_sequences: int
    num_tokens: int
    num_equal: int
    sum_abs_d: float
    sum_k3: float
    """Of exp(d) - 1 - d."""

    def __add__(self, other: GroupSums) -> GroupSums:
        added = ("num_sequences", "num_tokens", "num_equal", "sum_abs_d", "sum_k3")
        return replace(self, **{name: getattr(self, name) + getattr(other, name) for name in added})


class ReplayedSteps(list[ReplayedStep], Table):
    """Every step under every arm."""

    def __init__(
        self, steps: Iterable[ReplayedStep] = (), *, sample: Sample | None = None, plan: ReplayPlan | None = None
    ):
        super().__init__(steps)
        self.plan = ReplayPlan() if plan is None else plan
        """What was to be done; with its time after a dry run."""
        self.sample = sample
        """What was drawn, where a sample alone was scored: steps then hold the sample's numbers."""
        self.groups: list[GroupSums] = []
        """Of each group of the sample under each arm."""

    _text = "tim_trace.analysis.replay_text:replay_text"

    def _table(self) -> tuple[Sequence[str], Sequence[Sequence[Any]]]:
        names = [field.name for field in fields(ReplayedStep)]
        return names, [[getattr(step, name) for name in names] for step in self]


def by_arm(results: Sequence[ReplayedStep]) -> list[ReplayedArm]:
    """Take each arm's steps together."""
    summaries = []
    for name in dict.fromkeys(result.arm for result in results):
        steps = [result for result in results if result.arm == name]
        tokens, scored = (
            sum(step.num_tokens for step in steps),
            [step for step in steps if step.not_held != REFUSED or step.num_tokens],
        )
        summaries.append(
            ReplayedArm(
                arm=name,
                num_steps=len(steps),
                num_tokens=tokens,
                share_equal=sum(step.num_equal for step in steps) / max(tokens, 1),
                mean_abs_d=sum(step.mean_abs_d * step.num_tokens for step in scored) / max(tokens, 1)
                if scored
                else nan,
                max_abs_d=max((step.max_abs_d for step in scored), default=nan),
                identity_held=sum(step.identity_held for step in steps),
            )
        )
    return summaries
