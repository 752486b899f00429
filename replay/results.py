from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import nan

from ..schemas.passes import TRAIN
from ..schemas.results import Table
from .backends.trusted import REFUSED
from .sample import Sample


@dataclass(slots=True, kw_only=True)
class ArmPlan:
    arm: str
    num_steps: int = 0
    """Number of steps with unscored sequences."""
    num_sequences: int = 0
    """Number of unscored sequences."""
    num_tokens: int = 0
    """Number of tokens to run through the model, including scored ones that share a forward pass with unscored ones."""
    num_versions: int = 0
    """Number of times weights are loaded: once per change in policy version."""
    tokens_per_s: float | None = None
    """Speed (tokens per second) measured on the first rows, or None if it has not been measured."""
    load_s: float | None = None
    """Time to load one policy version's weights (seconds), or None if it has not been measured."""

    @property
    def seconds(self) -> float | None:
        """Estimated time in a single process, or None until the speed is known."""
        if not self.num_tokens:
            return 0.0
        if self.tokens_per_s is None:
            return None
        return self.num_tokens / self.tokens_per_s + self.num_versions * (self.load_s or 0.0)


class ReplayPlan(list[ArmPlan], Table):
    _text = "tim_trace.analysis.replay_text:plan_text"

    @property
    def seconds(self) -> float | None:
        known = [arm.seconds for arm in self]
        return None if None in known else sum(seconds or 0.0 for seconds in known)

    def _table(self) -> tuple[Sequence[str], Sequence[Sequence[object]]]:
        names = [field.name for field in fields(ArmPlan)] + ["seconds"]
        return names, [[getattr(arm, name) for name in names] for arm in self]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedStep:
    """One step's scores in one arm, compared with the recorded pass. d is the replayed logprob minus the recorded one
    (nats). If the recording cannot be replayed here, the as-recorded arm has no tokens, and its d is NaN."""

    arm: str
    step: int
    num_tokens: int
    num_equal: int
    mean_abs_d: float
    max_abs_d: float
    identity_held: bool
    """True if replaying this step as recorded reproduced every bit. Only then is d due to the arm alone."""
    not_held: str | None = None
    """Why the as-recorded replay did not reproduce every bit: `refused` (the recorded setup cannot run here), a code in
    `trusted.WHY` (recorded code was replaced), `conditions` (different settings, versions or hardware), `other-inputs`
    (more than rounding: different weights, tokens or settings) or `unexplained`. None if every bit was reproduced."""
    differs: tuple[str, ...] = ()
    """For the as-recorded arm, the contract fields that differ, or why it cannot run here. Empty if all bits match."""
    fitting_version: int | None = None
    """With `other-inputs`, at the first such step: the nearby policy version whose weights give the recorded logprobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedArm:
    """One arm's scores in all replayed steps. d is the replayed logprob minus the recorded one (nats)."""

    arm: str
    num_steps: int
    num_tokens: int
    share_equal: float
    mean_abs_d: float
    max_abs_d: float
    steps_reproduced: int
    """Number of steps where replaying as recorded reproduced every bit."""


class ReplayedSteps(list[ReplayedStep], Table):
    def __init__(self, *, sample: Sample | None = None, plan: ReplayPlan | None = None, replayed_pass: str = TRAIN):
        super().__init__()
        self.replayed_pass = replayed_pass
        """The recorded pass that the replayed logprobs are compared with."""
        self.plan = ReplayPlan() if plan is None else plan
        """Planned work. Includes time estimates after a dry run."""
        self.sample = sample
        """The sample, if only a sample was scored. Results then cover only sequences in the sample."""

    _text = "tim_trace.analysis.replay_text:replay_text"

    def _table(self) -> tuple[Sequence[str], Sequence[Sequence[object]]]:
        names = [field.name for field in fields(ReplayedStep)]
        return names, [[getattr(step, name) for name in names] for step in self]


def by_arm(results: Sequence[ReplayedStep]) -> list[ReplayedArm]:
    summaries = []
    for name in dict.fromkeys(result.arm for result in results):
        steps = [result for result in results if result.arm == name]
        tokens = sum(step.num_tokens for step in steps)
        scored = [step for step in steps if step.not_held != REFUSED or step.num_tokens]
        sum_abs_d = sum(step.mean_abs_d * step.num_tokens for step in scored)
        summaries.append(ReplayedArm(
            arm=name, num_steps=len(steps), num_tokens=tokens,
            share_equal=sum(step.num_equal for step in steps) / max(tokens, 1),
            mean_abs_d=sum_abs_d / max(tokens, 1) if scored else nan,
            max_abs_d=max((step.max_abs_d for step in scored), default=nan),
            steps_reproduced=sum(step.identity_held for step in steps),
        ))  # fmt: skip
    return summaries
