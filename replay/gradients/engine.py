"""`tim-trace gradient`: forward and backward of recorded steps again, as recorded and otherwise."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ...schemas.errors import CannotReplay, InvalidOption, WeightsMissing, option
from ...schemas.loss import Loss, parse_loss, read_loss
from ...schemas.steps import parse_steps
from ...tracer.progress import Progress, no_progress
from ..arms import check_distinct
from ..batching import check_tokens
from ..meter import Meter
from ..recorded import RecordedRun
from .arm import GradientArm, corrected, parse_gradient_arm
from .divisors import divisors
from .held import HeldModel
from .loss import StepLoss, passes_of
from .results import GradientReport, GradientStep
from .scorer import GradientScorer
from .step import StepPasses
from .update import Update
from .updates import GRAD_NORMS, LEARNING_RATES, hyperparameters, logged, loss_steps, updates

LEAST_MICRO_BATCHES = 4
_UNITS = 1000
"""Of progress, a step."""


def gradient(
    trace: str | os.PathLike[str],
    *,
    steps: str = "all",
    arm: Sequence[str | GradientArm] = (),
    micro_batches: int = LEAST_MICRO_BATCHES,
    loss: str | None = None,
    smoothness: float | None = None,
    model_factory: str | None = None,
    weights_from: str | os.PathLike[str] | None = None,
    progress: Progress = no_progress,
) -> GradientReport:
    """Take the gradient of recorded steps again, as recorded and under each arm, and say how far they lie apart.

    Forward and backward run from the recorded weights, with the recorded loss, micro-batches and padding. The recording
    is done first: its norm is held against the grad norm that was logged. `arm` names arms, as text: changes of the
    forward and backward as `replay` takes them (dtype=bf16, batch-size=1, attention=math), `logprobs=PASS` below the ratio
    and above the correction's (train, rollout, current, replay/<arm>), and `correction=RULE` (none, exact, token_exact,
    sequence_exact, token_truncate:2, token_mask:0.5_5, sequence_truncate:2, sequence_mask:3); with commas in between, an
    arm changes several of them. correction=exact has the untruncated weights train / rollout: its gradient is what the
    corrections stand for.

    Bias and variance are over the recorded micro-batches where there are `micro_batches` of them or more. Where there are
    fewer, the step is run once more with its groups dealt out to so many; 0 leaves that, and them, out. `loss` says fields
    of the loss where the trace does not, or in the place of what it says, as `kind=ppo_clip,clip_high=0.28`.
    `smoothness` is L of arXiv 2602.01826, eq. 13. `model_factory`, as `module:function`, builds the model where
    transformers does not know its class. `weights_from` is the folder of the run's checkpoints, where the trace has no weights
    of its own. Nothing is written.

    Raises CannotReplay, WeightsMissing, DamagedTrace, InvalidOption, TraceNotFound.
    """
    if micro_batches < 0 or 0 < micro_batches < LEAST_MICRO_BATCHES:
        raise InvalidOption(
            f"got {micro_batches}; use {LEAST_MICRO_BATCHES} or more, or 0 for none", option="micro_batches"
        )
    arms = _arms(arm)
    run = RecordedRun(trace, model_factory=model_factory, weights_from=weights_from)
    chosen = parse_steps(steps, loss_steps(run))
    settings = hyperparameters(run)
    asked = _Asked(
        loss=loss_of(run, settings, loss),
        accumulated=settings.get("gradient_accumulation_steps"),
        micro_batches=micro_batches,
        smoothness=smoothness,
        norms=logged(run, GRAD_NORMS),
        rates=logged(run, LEARNING_RATES),
    )
    found: list[GradientStep] = []
    notes: list[str] = []
    taken = _Taken(run, arms, asked)
    try:
        with progress("taking gradients", len(chosen) * _UNITS) as advance:
            for step in chosen:
                meter = Meter(advance, _UNITS)
                try:
                    for result, share in taken.step(step):
                        found.append(result)
                        meter.add(share)
                except (WeightsMissing, CannotReplay) as error:
                    if len(chosen) == 1:
                        raise
                    notes.append(f"step {step}: {error}")
                meter.finish()
    finally:
        taken.close()
    if not found:
        raise CannotReplay(notes[0])
    return GradientReport(run=run.store.name, loss=asked.loss, steps=tuple(found), notes=tuple(notes))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What was asked for, and what the trace says of the whole run."""

    loss: Loss
    accumulated: float | None
    """Micro-batches of an optimizer step, by the hyperparameters."""
    micro_batches: int
    smoothness: float | None
    norms: dict[int, float]
    rates: dict[int, float]


class _Taken:
    """Takes gradients, one optimizer step after the other."""

    def __init__(self, run: RecordedRun, arms: Sequence[GradientArm], asked: _Asked):
        import torch

        self.run, self.arms, self.asked = run, arms, asked
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._passes = {name for arm in arms for name in passes_of(asked.loss, arm)}
        self._held = HeldModel(run.weights)
        self._scorers: dict[str, list[GradientScorer]] = {}

    def step(self, step: int) -> Iterator[tuple[GradientStep, float]]:
        """The results of a step's updates, arm by arm, each with its share of the work. Raises CannotReplay, WeightsMissing."""
        found = list(updates(self.run, step, self._passes, self.asked.norms))
        for update in found:
            check_tokens([entry.row for entry in update.rows], self.run.model["config"])
            for result in self._update(update):
                yield result, 1 / (len(found) * len(self.arms))

    def close(self) -> None:
        """Let go of the model."""
        self._held.close()

    def _update(self, update: Update) -> Iterator[GradientStep]:
        passes = StepPasses(
            update,
            micro_batches=self.asked.micro_batches,
            logged_norm=None if update.metric_step is None else self.asked.norms.get(update.metric_step),
            learning_rate=None if update.metric_step is None else self.asked.rates.get(update.metric_step),
            smoothness=self.asked.smoothness,
            accumulated=self.asked.accumulated,
        )
        for arm, scorer in zip(self.arms, self._scorers_of(update), strict=True):
            stale = arm.forward.weights_version
            version = update.policy_version if stale is None else stale
            self._held.ready(scorer, version, update.rows[0].row.attempt)
            yield passes.take(arm, scorer, self._loss(arm, update))

    def _scorers_of(self, update: Update) -> list[GradientScorer]:
        if update.contract not in self._scorers:
            contract = self.run.train_contract(update.contract, update.loss_pass)
            self._held.close()
            self._scorers[update.contract] = [
                GradientScorer(self.run, arm.forward, contract, self._device) for arm in self.arms
            ]
        return self._scorers[update.contract]

    def _loss(self, arm: GradientArm, update: Update) -> StepLoss:
        loss = corrected(self.asked.loss, arm.correction)
        below = arm.logprobs or loss.denominator
        if arm.logprobs is None and below == "train" and update.own_ratio:
            below = "current"
        return StepLoss(loss, below, arm.logprobs or "train", divisors(loss, update))


def _arms(given: Sequence[str | GradientArm]) -> list[GradientArm]:
    arms = [GradientArm(), *(arm if isinstance(arm, GradientArm) else parse_gradient_arm(arm) for arm in given)]
    check_distinct([arm.name for arm in arms])
    return arms


def loss_of(run: RecordedRun, settings: dict[str, object], text: str | None) -> Loss:
    recorded = read_loss(settings)
    if text is not None:
        said = parse_loss(text, recorded)
        return replace(said, unknown=()) if recorded is None else said
    if recorded is None:
        named = f" (loss_type {settings['loss_type']!r})" if "loss_type" in settings else ""
        raise CannotReplay(
            f"{run.store.url}: says no loss that is known here{named}; say it as "
            f"{option('loss', 'kind=ppo_clip,clip_high=0.28,aggregation=token_mean')}, or record it with Recorder.add_loss"
        )
    return recorded
