"""`tim-trace gradient`: run forward and backward of recorded steps again, as recorded and with changes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ...schemas.errors import CannotReplay, WeightsMissing, option
from ...schemas.loss import Loss, parse_loss, read_loss
from ...schemas.steps import parse_steps
from ...tracer.cluster import run_units
from ...tracer.progress import Advance, Progress, no_progress
from ..arms import check_distinct
from ..batching import check_tokens
from ..gpus import device_here, gpus_of_actor
from ..loaded import LoadedModel
from ..recorded import RecordedRun
from .arm import GradientArm, corrected, parse_gradient_arm
from .loss import StepLoss, divisors, passes_of
from .results import GradientReport, GradientStep
from .scorer import GradientScorer
from .step import StepPasses
from .update import GRAD_NORMS, Update, hyperparameters, logged, loss_steps, updates


def gradient(
    trace: str | os.PathLike[str],
    *,
    steps: str = "all",
    arm: Sequence[str | GradientArm] = (),
    loss: str | None = None,
    model_factory: str | None = None,
    weights_from: str | os.PathLike[str] | None = None,
    allow_kernel: Sequence[str] = (),
    ray: str | None = None,
    gpus_per_arm: float | None = None,
    progress: Progress = no_progress,
) -> GradientReport:
    """Recompute the gradient of recorded steps, as recorded and under each arm, and compare the results.

    Forward and backward run from the recorded weights, with the recorded loss, micro-batches and padding. The recording
    comes first; its norm is compared with the logged grad norm. `arm` is a list of arms as text: changes to forward and
    backward as in `replay` (dtype=bf16, batch-size=1, attention=math), `logprobs=PASS` for the denominator of the
    importance ratio and the numerator of the correction's (train, rollout, current, replay/<arm>), and
    `correction=RULE` (none, exact, token_exact, sequence_exact, token_truncate:2, token_mask:0.5_5,
    sequence_truncate:2, sequence_mask:3). Commas combine several changes in one arm. correction=exact uses the
    untruncated weights train / rollout, which the other corrections approximate.

    The variance is computed over the recorded micro-batches if there are at least 4 of them. `loss` sets fields of the loss that
    the trace does not have, or overrides them, e.g. `kind=ppo_clip,clip_high=0.28`. `model_factory`, as
    `module:function`, builds a model whose class transformers does not have. `weights_from` is the folder of the run's
    checkpoints, for a trace without weights; `allow_kernel` lists recorded attention kernels that may be fetched from the
    hub and run. Nothing is written.

    `ray` distributes the steps over the actors of a Ray cluster: `local` starts one here; `auto` or `host:port` connects to
    a running one, whose nodes see the trace at the same path. `gpus_per_arm` is the number of GPUs per actor, or a fraction
    of one; by default 1 if this machine has a GPU, else 0.

    Raises CannotReplay, WeightsMissing, DamagedTrace, InvalidOption, TraceNotFound.
    """
    gpus = gpus_of_actor(ray, gpus_per_arm)
    arms = _arms(arm)
    run = RecordedRun(trace, model_factory=model_factory, weights_from=weights_from, allow_kernel=allow_kernel)
    chosen = parse_steps(steps, loss_steps(run))
    settings = hyperparameters(run)
    asked = _Asked(
        loss=loss_of(run, settings, loss),
        accumulated=settings.get("gradient_accumulation_steps"),
        norms=logged(run, GRAD_NORMS),
    )
    found: list[GradientStep] = []
    notes: list[str] = []
    with progress("taking gradients", len(chosen)) as advance:
        outcomes = (
            _here(run, arms, asked, chosen, advance)
            if ray is None
            else _on_cluster(run, arms, asked, chosen, advance, ray, gpus)
        )
        for outcome in outcomes:
            found += outcome.results
            if outcome.refusal is not None:
                if len(chosen) == 1:
                    raise outcome.refusal
                notes.append(f"step {outcome.step}: {outcome.refusal}")
    if not found:
        raise CannotReplay(notes[0])
    return GradientReport(run=run.store.name, loss=asked.loss, steps=tuple(found), notes=tuple(notes))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """The results of a step, and the error if it failed."""

    step: int
    results: list[GradientStep]
    """Results of each update and arm, up to an error."""
    refusal: WeightsMissing | CannotReplay | None


def _here(
    run: RecordedRun, arms: Sequence[GradientArm], asked: _Asked, steps: Sequence[int], advance: Advance
) -> Iterator[_Outcome]:
    """Yield the outcome of each step, computed in this process."""
    taker = _StepTaker(run, arms, asked)
    try:
        for step in steps:
            yield taker.run(step)
            advance(1)
    finally:
        taker.close()


def _on_cluster(
    run: RecordedRun, arms: Sequence[GradientArm], asked: _Asked, steps: Sequence[int], advance: Advance, address: str,
    gpus: float,
) -> Iterator[_Outcome]:  # fmt: skip
    """Yield the outcome of each step, computed on a cluster, in order of steps."""
    import torch

    threads = torch.get_num_threads()
    outcomes: dict[int, _Outcome] = {}
    worker = _StepTaker(run, arms, asked, threads)
    for number, outcome in run_units(address, worker, steps, num_cpus=1 if gpus else threads, num_gpus=gpus):
        outcomes[number] = outcome
        advance(1)
    yield from (outcomes[number] for number in range(len(steps)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """The options of a call, and the settings and metrics of the run."""

    loss: Loss
    accumulated: float | None
    """Micro-batches per optimizer step, from the hyperparameters; None if not recorded."""
    norms: dict[int, float]


class _StepTaker:
    """Computes gradients, one step at a time; on a cluster, in an actor that opens the trace itself."""

    def __init__(self, run: RecordedRun, arms: Sequence[GradientArm], asked: _Asked, threads: int | None = None):
        """`threads` is torch's number of threads in the parent process of an actor; None in this process."""
        self.arms, self.asked = arms, asked
        self._opening, self._threads = run.opening, threads
        if threads is None:
            self.trace = run
        self._passes = {name for arm in arms for name in passes_of(asked.loss, arm)}
        self._scorers: dict[str, list[GradientScorer]] = {}

    @cached_property
    def trace(self) -> RecordedRun:
        """The trace, opened by an actor."""
        import torch

        torch.set_num_threads(self._threads or 1)
        return RecordedRun(**self._opening)

    @cached_property
    def _loaded(self) -> LoadedModel:
        return LoadedModel(self.trace.weights)

    def run(self, step: int) -> _Outcome:
        """Return the results of a step's updates under each arm, or the error."""
        results: list[GradientStep] = []
        try:
            for update in updates(self.trace, step, self._passes, self.asked.norms):
                check_tokens([entry.row for entry in update.rows], self.trace.model["config"])
                results.extend(self._update(update))
        except (WeightsMissing, CannotReplay) as error:
            return _Outcome(step=step, results=results, refusal=error)
        return _Outcome(step=step, results=results, refusal=None)

    def close(self) -> None:
        """Release the model."""
        self._loaded.close()

    def _update(self, update: Update) -> Iterator[GradientStep]:
        passes = StepPasses(
            update,
            logged_norm=None if update.metric_step is None else self.asked.norms.get(update.metric_step),
            accumulated=self.asked.accumulated,
        )
        for arm, scorer in zip(self.arms, self._scorers_of(update), strict=True):
            stale = arm.forward.weights_version
            version = update.policy_version if stale is None else stale
            self._loaded.ready(scorer, version, update.rows[0].row.attempt)
            yield passes.take(arm, scorer, self._loss(arm, update))

    def _scorers_of(self, update: Update) -> list[GradientScorer]:
        if update.contract not in self._scorers:
            contract = self.trace.train_contract(update.contract, update.loss_pass)
            self._loaded.close()
            self._scorers[update.contract] = [
                GradientScorer(self.trace, arm.forward, contract, device_here()) for arm in self.arms
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
            f"{run.store.url}: has no known loss{named}; set it with "
            f"{option('loss', 'kind=ppo_clip,clip_high=0.28,aggregation=token_mean')}, or record it with Recorder.add_loss"
        )
    return recorded
