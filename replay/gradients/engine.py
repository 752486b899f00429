"""`tim-trace gradient`: rerun recorded forward and backward passes, unchanged and with changes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import torch

from ...schemas.errors import CannotReplay, WeightsMissing, option
from ...schemas.loss import Loss, parse_loss, read_loss
from ...schemas.passes import CURRENT, TRAIN
from ...schemas.steps import parse_steps
from ...tracer.cluster import run_units
from ...tracer.progress import Progress, no_progress
from ..arms import check_distinct
from ..batching import check_tokens
from ..loaded import LoadedModel, device_here, gpus_of_actor
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

    The gradient as recorded comes first, and its norm is compared with the logged grad norm. `arm` lists arms as text.
    An arm can change the forward and backward passes as in `replay` (dtype=bf16, batch-size=1, attention=math), the
    pass used in the importance and correction ratios (`logprobs=PASS`: train, rollout, current, replay/<arm>), and the
    correction (`correction=RULE`: none, exact, token_exact, sequence_exact, token_truncate:2, token_mask:0.5_5,
    sequence_truncate:2, sequence_mask:3). Commas combine changes in one arm. With correction=exact, the
    weight is the untruncated ratio train / rollout, which the other corrections approximate.

    The variance across micro-batches is computed only for steps with at least 4 micro-batches. `loss` overrides loss
    fields or sets missing ones, e.g. `kind=ppo_clip,clip_high=0.28`. `model_factory` names a function
    (`module:function`) that builds models missing from transformers. `weights_from` is the run's checkpoint folder,
    needed if the trace has no weights. `allow_kernel` lists recorded hub kernels that may run. Nothing is written.

    `ray` distributes the steps across a Ray cluster: `local` starts one here, and `auto` or `host:port` connects to a
    running one. Every node needs the trace at the same path. `gpus_per_arm` is the number of GPUs per actor, or a
    fraction. The default is 1 if this machine has a GPU, else 0.

    Raises CannotReplay, WeightsMissing, DamagedTrace, InvalidOption, TraceNotFound.
    """
    gpus = gpus_of_actor(ray, gpus_per_arm)
    arms = [GradientArm(), *(each if isinstance(each, GradientArm) else parse_gradient_arm(each) for each in arm)]
    check_distinct([each.name for each in arms])
    run = RecordedRun(trace, model_factory=model_factory, weights_from=weights_from, allow_kernel=allow_kernel)
    chosen = parse_steps(steps, loss_steps(run))
    settings = hyperparameters(run)
    used = loss_of(run, settings, loss)
    found: list[GradientStep] = []
    notes: list[str] = []
    with progress("computing gradients", len(chosen)) as advance:
        threads = torch.get_num_threads()
        taker = _StepTaker(
            run, arms, used, settings.get("gradient_accumulation_steps"), None if ray is None else threads
        )
        outcomes: dict[int, _Outcome] = {}
        for number, outcome in run_units(ray, taker, chosen, num_cpus=1 if gpus else threads, num_gpus=gpus):
            outcomes[number] = outcome
            advance(1)
    for number, (results, refusal) in sorted(outcomes.items()):
        found += results
        if refusal is not None:
            if len(chosen) == 1:
                raise refusal
            notes.append(f"step {chosen[number]}: {refusal}")
    if not found:
        raise CannotReplay(notes[0])
    return GradientReport(run=run.store.name, loss=used, steps=tuple(found), notes=tuple(notes))


_Outcome = tuple[list[GradientStep], WeightsMissing | CannotReplay | None]
"""A step's results, one per update and arm, and the error that ended the step (None if it was completed)."""


class _StepTaker:
    """Computes gradients step by step. On a cluster, each actor opens the trace itself."""

    def __init__(
        self, run: RecordedRun, arms: Sequence[GradientArm], loss: Loss, accumulated: float | None, threads: int | None
    ):
        self._arms, self._loss, self._accumulated, self._norms = arms, loss, accumulated, logged(run, GRAD_NORMS)
        self._opening, self._threads = run.opening, threads
        if threads is None:
            self.trace = run
        self._passes = {name for arm in arms for name in passes_of(loss, arm)}
        self._scorers: dict[str, list[GradientScorer]] = {}

    @cached_property
    def trace(self) -> RecordedRun:
        torch.set_num_threads(self._threads or 1)
        return RecordedRun(**self._opening)

    @cached_property
    def _loaded(self) -> LoadedModel:
        return LoadedModel(self.trace.weights)

    def run(self, step: int) -> _Outcome:
        results: list[GradientStep] = []
        try:
            for update in [*updates(self.trace, step, self._passes, self._norms)]:
                check_tokens([entry.row for entry in update.rows], self.trace.model["config"])
                results.extend(self._update(update))
        except (WeightsMissing, CannotReplay) as error:
            return results, error
        return results, None

    def close(self) -> None:
        self._loaded.close()

    def _update(self, update: Update) -> Iterator[GradientStep]:
        norm = None if update.metric_step is None else self._norms.get(update.metric_step)
        passes = StepPasses(update, logged_norm=norm, accumulated=self._accumulated)
        for arm, scorer in zip(self._arms, self._scorers_of(update), strict=True):
            stale = arm.weights_version
            self._loaded.ready(scorer, update.policy_version if stale is None else stale, update.rows[0].row.attempt)
            loss = corrected(self._loss, arm.correction)
            below = arm.logprobs or loss.denominator
            if arm.logprobs is None and below == TRAIN and update.own_ratio:
                below = CURRENT
            yield passes.take(arm, scorer, StepLoss(loss, below, arm.logprobs or TRAIN, divisors(loss, update)))

    def _scorers_of(self, update: Update) -> list[GradientScorer]:
        if update.contract not in self._scorers:
            contract = self.trace.train_contract(update.contract, update.loss_pass)
            self._loaded.close()
            self._scorers[update.contract] = [
                GradientScorer(self.trace, arm, contract, device_here()) for arm in self._arms
            ]
        return self._scorers[update.contract]


def loss_of(run: RecordedRun, settings: dict[str, float | str], text: str | None) -> Loss:
    recorded = read_loss(settings)
    if text is not None:
        parsed = parse_loss(text, recorded)
        return replace(parsed, unknown=()) if recorded is None else parsed
    if recorded is None:
        named = f" (loss_type {settings['loss_type']!r})" if "loss_type" in settings else ""
        raise CannotReplay(
            f"{run.store.url}: the loss is unknown{named}; set it with "
            f"{option('loss', 'kind=ppo_clip,clip_high=0.28,aggregation=token_mean')}, or record it with Recorder.add_loss"
        )
    return recorded
