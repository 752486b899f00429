"""Results of a replay."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from math import nan
from typing import Any

from ..schemas.results import Table
from .backends.trusted import REFUSED
from .plan import ReplayPlan
from .sample import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedStep:
    """One step under one arm, compared with the replayed pass (`train` if recorded): d = replay - train, nats.

    If the identity arm was refused, it has no tokens and d is NaN.
    """

    arm: str
    step: int
    num_tokens: int
    num_equal: int
    """Number of tokens whose logprob has the same bits as the recorded one."""
    mean_abs_d: float
    max_abs_d: float
    identity_held: bool
    """True if replaying this step as recorded reproduced every bit. Only then are the differences d due to the arm
    alone."""
    not_held: str | None = None
    """Reason why replaying the step as recorded did not reproduce every bit: `refused` (the recording does not run
    here), a code of `trusted.WHY` (recorded code was replaced), `conditions` (other settings, versions or hardware) or
    `unexplained`; None if it did."""
    differs: tuple[str, ...] = ()
    """For the identity arm only, if bits differ: the contract fields that differ, or the reason why the replay was
    refused.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedArm:
    """Summary of one arm over all replayed steps; d = replay - train, nats."""

    arm: str
    num_steps: int
    num_tokens: int
    share_equal: float
    """Share of tokens whose logprob has the same bits as the recorded one."""
    mean_abs_d: float
    max_abs_d: float
    identity_held: int
    """Number of steps in which replaying as recorded reproduced every bit."""


class ReplayedSteps(list[ReplayedStep], Table):
    """The results of all steps under all arms."""

    def __init__(
        self, steps: Iterable[ReplayedStep] = (), *, sample: Sample | None = None, plan: ReplayPlan | None = None
    ):
        super().__init__(steps)
        self.plan = ReplayPlan() if plan is None else plan
        """The planned work, with time estimates after a dry run."""
        self.sample = sample
        """The sample, if only a sample was scored; the steps then describe only the sampled sequences."""

    _text = "tim_trace.analysis.replay_text:replay_text"

    def _table(self) -> tuple[Sequence[str], Sequence[Sequence[Any]]]:
        names = [field.name for field in fields(ReplayedStep)]
        return names, [[getattr(step, name) for name in names] for step in self]


def by_arm(results: Sequence[ReplayedStep]) -> list[ReplayedArm]:
    """Return a summary of each arm over its steps."""
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
