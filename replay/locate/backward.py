"""`tim-trace locate --backward`: where the gradients of two executions part."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...schemas.errors import CannotReplay, InvalidOption
from ...schemas.steps import parse_steps
from ...tracer.located.results import BEYOND, A, B
from ...tracer.progress import Progress, no_progress
from ...tracer.routing import has_experts
from ..arms import Arm
from ..backends import kernels
from ..backends.double import keep_double
from ..batching import ForwardBatch, PaddedBatch, check_tokens
from ..gradients.arm import GradientArm, corrected, parse_gradient_arm
from ..gradients.divisors import divisors
from ..gradients.engine import loss_of
from ..gradients.loss import StepLoss, passes_of
from ..gradients.scorer import GradientScorer
from ..gradients.update import LossRow, Update
from ..gradients.updates import hyperparameters, loss_steps, updates
from ..recorded import RecordedRun
from ..settings import settings
from .backward_reference import BackwardReference, JudgedGradient, kind_of_judged
from .backward_results import PARAMETER, BackwardError, LocatedBackward, ParameterDifference
from .backward_taps import BackwardCall, BackwardTaps
from .bounds import unit
from .chosen import choose
from .engine import REFERENCE
from .execution import Prepare
from .names import kind_of, layer_of

Spans = list[tuple[LossRow, slice]]
"""Rows of a forward, each with its place in [N]."""


def locate_backward(
    trace: str | os.PathLike[str],
    *,
    steps: str = "-1",
    arm: str | None = None,
    against: str = REFERENCE,
    sequences: str = "8",
    loss: str | None = None,
    model_factory: str | None = None,
    against_factory: str | None = None,
    weights_from: str | os.PathLike[str] | None = None,
    prepare: Prepare | None = None,
    prepare_against: Prepare | None = None,
    progress: Progress = no_progress,
) -> LocatedBackward:
    """Take the gradient of recorded sequences' loss through two executions, and say where they part.

    `arm` and `against` are arms as `gradient` takes them; `steps` names one step, of which the first optimizer step is taken;
    `sequences` are chosen as in `locate`, and only their share of the loss is differentiated, in the forwards that they were recorded
    in. `loss` says fields of the loss where the trace does not. Of each operator, what it passes on of what came back to it, and its
    parameters' gradients, are held against float64 on the same numbers, with the execution's own weights: the first on the way back
    that is beyond its bound (module `backward_bounds`) computes something else.

    `prepare` and `prepare_against` change a model of either side, once its weights are loaded. Nothing is written. Raises
    CannotReplay, WeightsMissing, DamagedTrace, InvalidOption, TraceNotFound.
    """
    arms = {side: parse_gradient_arm(text) if text else GradientArm() for side, text in ((A, arm), (B, against))}
    run = RecordedRun(trace, model_factory=model_factory, weights_from=weights_from)
    other = RecordedRun(trace, model_factory=against_factory, weights_from=weights_from)
    asked = parse_steps(steps, loss_steps(run))
    if len(asked) != 1:
        raise InvalidOption(f"{steps!r} names {len(asked)} steps; name one", option="steps")
    recorded = loss_of(run, hyperparameters(run), loss)
    passes = {name for each in arms.values() for name in passes_of(recorded, each)}
    update = updates(run, asked[0], passes, {})[0]
    check_tokens([entry.row for entry in update.rows], run.model["config"])
    chosen = choose(run, asked[0], [entry.row for entry in update.rows], sequences)
    contract = run.train_contract(update.contract, update.loss_pass)
    names = {row.seq_id for row in chosen.rows}
    sides = {
        side: _Side(each, arms[side], contract, update, names, change)
        for side, each, change in ((A, run, prepare), (B, other, prepare_against))
    }
    losses = {side: _loss(recorded, arms[side], update) for side in sides}
    found = {}
    with progress("taking gradients", sum(len(side.parts) for side in sides.values())) as advance:
        for side, each in sides.items():
            for part in each.parts:
                each.take(part, losses[side])
                advance(1)
            found[side] = each
    operators = tuple(error for side, each in found.items() for error in each.errors(side))
    beyond = sorted((each for each in operators if each.ratio > BEYOND), key=lambda each: each.order)
    parameters = tuple(_differences(found[A], found[B]))
    norm_a, norm_b = (_norm(each.gradients) for each in found.values())
    difference, cosine = _apart(
        norm_a, norm_b, sum(found[A].dot(found[B], name) for name in found[A].every), _off(found[A], found[B])
    )
    return LocatedBackward(
        run=run.store.name, step=asked[0], policy_version=update.policy_version, a=arms[A].name, b=arms[B].name,
        chosen=chosen.how, num_sequences=len(names),
        num_tokens=sum(entry.num_tokens for entry in update.rows if entry.row.seq_id in names),
        norm_a=norm_a, norm_b=norm_b, difference=difference, cosine=cosine,
        operators=operators, parameters=parameters, first=beyond[0] if beyond else None,
    )  # fmt: skip


def _loss(recorded: Any, arm: GradientArm, update: Update) -> StepLoss:
    loss = corrected(recorded, arm.correction)
    below = arm.logprobs or loss.denominator
    if arm.logprobs is None and below == "train" and update.own_ratio:
        below = "current"
    return StepLoss(loss, below, arm.logprobs or "train", divisors(loss, update))


@dataclass(frozen=True, slots=True)
class _Part:
    """One forward with chosen sequences in it."""

    batch: ForwardBatch
    chosen: Spans


class _Side:
    """One execution: its forwards and backwards, and what they introduced."""

    def __init__(
        self,
        run: RecordedRun,
        arm: GradientArm,
        contract: Any,
        update: Update,
        names: set[str],
        prepare: Prepare | None,
    ):
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
        forward = arm.forward
        version = update.policy_version if forward.weights_version is None else forward.weights_version
        tensors = run.weights.load(version, update.rows[0].row.attempt)
        self.scorer = GradientScorer(run, forward, contract, device)
        self.model: Any = self.scorer.build()
        self.scorer.put(self.model, tensors)
        if prepare is not None:
            prepare(self.model)
        self.scorer.attach(self.model)
        if self.scorer.has_dropout:
            raise CannotReplay(
                f"arm {arm.name}: the model drops out at random in training, which no other forward repeats; leave "
                "--backward out, or record a model without dropout"
            )
        if any(config.get("use_dora") for config in (run.model.get("adapters") or {}).values()):
            raise CannotReplay(f"{run.store.url}: the gradient of DoRA's magnitudes has no bound; leave --backward out")
        if has_experts(run.model["config"]):
            raise CannotReplay(
                f"{run.store.url}: the backward of a mixture of experts has no bound; leave --backward out"
            )
        self.parts = list(self._parts(update, names))
        shape = {name: getattr(forward, name) for name in ("batch_size", "batch_tokens", "padding", "temperature")}
        plain = Arm(dtype="fp64", attention="eager", **shape)
        self.reference = BackwardReference(GradientScorer(run, plain, contract, device), tensors)
        self.reference.take_weights(self.model)
        self.gradients: dict[str, Any] = {}
        self._judged: dict[str, list[tuple[int, JudgedGradient]]] = {}
        self._introduced: dict[str, list[tuple[float, float]]] = {}

    @property
    def every(self) -> list[str]:
        """All parameters."""
        return [name for name, _ in self.model.named_parameters()]

    def _parts(self, update: Update, names: set[str]) -> Iterator[_Part]:
        for rows in update.places.values():
            for batch, entries in self.scorer._forwards(rows):
                if not isinstance(batch, PaddedBatch):
                    raise CannotReplay(
                        f"arm {self.scorer.arm.name}: gradients are compared in padded forwards; use padding=left or padding=right"
                    )
                ends = np.cumsum([len(entry.row.response_ids) for entry in entries])
                spans = [
                    (entry, slice(int(end) - len(entry.row.response_ids), int(end)))
                    for entry, end in zip(entries, ends, strict=True)
                    if entry.row.seq_id in names
                ]
                if spans:
                    yield _Part(batch, spans)

    def take(self, part: _Part, loss: StepLoss) -> None:
        """Run one forward and backward, and hold it against float64."""
        import torch

        scorer = self.scorer
        parameters = scorer.parameters
        taps, logprobs = BackwardTaps(self.model), BackwardCall()
        self.model.zero_grad(set_to_none=True)
        double = next(self.model.parameters()).dtype == torch.float64
        with ExitStack() as stack:
            stack.enter_context(settings(scorer.contract["torch"], scorer.arm))
            stack.enter_context(kernels.forced(scorer.arm.attention))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(keep_double() if double else nullcontext())
            stack.enter_context(taps.visited.listening())
            current_N = scorer._differentiable(part.batch)
            logprobs.gives = [current_N.detach().clone()]
            current_N.register_hook(lambda gradient: logprobs.came.update({0: gradient.detach().clone()}))
            value = _part_loss(part, loss, current_N)
            taps.visited.is_on = False
            value.backward()
        gradients = {name: each.grad.detach() for name, each in parameters.items() if each.grad is not None}
        for name, gradient in gradients.items():
            known = self.gradients.get(name)
            self.gradients[name] = gradient.double() if known is None else known + gradient.double()
        judged = self.reference.judge(
            part.batch,
            taps.calls,
            logprobs,
            gradients,
            lambda current: _part_loss(part, loss, current),
            self._head_dtype,
        )
        self._keep(judged)
        self.model.zero_grad(set_to_none=True)

    @property
    def _head_dtype(self) -> Any:
        """The coarsest dtype that the head computes in: under autocast the projection is narrower than what it takes."""
        made = self.scorer.numerics
        dtypes = (made.projection_dtype, made.logits_dtype, next(self.model.parameters()).dtype)
        return max((dtype for dtype in dtypes if dtype is not None), key=unit)

    def _keep(self, judged: list[JudgedGradient]) -> None:
        places: dict[str, int] = {}
        for each in judged:
            place = places.setdefault(each.operator, len(places))
            self._judged.setdefault(each.operator, []).append((place, each))

    def introduced(self, parameter: str) -> float | None:
        """Length of the own error of a parameter's operator, relative, the largest of its forwards."""
        owner = self.reference.owner.get(parameter, "")
        found = [each for _, each in self._judged.get(owner, []) if each.what == PARAMETER and each.size]
        return max((each.error / each.size for each in found), default=None)

    def errors(self, side: str) -> Iterator[BackwardError]:
        """What each operator introduced, in the order of the way back."""
        rows = []
        for operator, found in self._judged.items():
            worst = max((each for _, each in found), key=lambda each: each.ratio)
            rows.append(
                BackwardError(
                    side=side,
                    order=min(place for place, _ in found),
                    operator=operator,
                    kind=kind_of_judged(operator),
                    layer=layer_of(operator),
                    what=worst.what,
                    dtype=worst.dtype,
                    introduced=max((each.error / each.size for _, each in found if each.size), default=0.0),
                    ratio=worst.ratio,
                )
            )
        yield from sorted(rows, key=lambda row: row.order)

    def dot(self, other: _Side, name: str) -> float:
        """Of both gradients of a parameter."""
        a, b = self.gradients.get(name), other.gradients.get(name)
        return 0.0 if a is None or b is None else float((a * b).sum())

    def square_off(self, other: _Side, name: str) -> float:
        """|a - b|^2 of a parameter."""
        a, b = self.gradients.get(name), other.gradients.get(name)
        if a is None or b is None:
            return sum(float(each.square().sum()) for each in (a, b) if each is not None)
        return float((a - b).square().sum())


def _part_loss(part: _Part, loss: StepLoss, current_N: Any) -> Any:
    """The chosen rows' share of the loss."""
    import torch

    taken = torch.cat([current_N[span] for _, span in part.chosen])
    return loss([entry for entry, _ in part.chosen], taken)


def _norm(gradients: Mapping[str, Any]) -> float:
    return float(np.sqrt(sum(float(each.square().sum()) for each in gradients.values())))


def _off(a: _Side, b: _Side) -> float:
    return float(sum(a.square_off(b, name) for name in a.every))


def _apart(norm_a: float, norm_b: float, dot: float, square: float) -> tuple[float | None, float | None]:
    """|a - b| / |a|, and the cosine."""
    difference = float(np.sqrt(square)) / norm_a if norm_a else None
    return difference, dot / (norm_a * norm_b) if norm_a and norm_b else None


def _differences(a: _Side, b: _Side) -> Iterator[ParameterDifference]:
    total = _off(a, b)
    for name in a.every:
        square = a.square_off(b, name)
        norms = [_norm({name: side.gradients[name]}) if name in side.gradients else 0.0 for side in (a, b)]
        difference, cosine = _apart(norms[0], norms[1], a.dot(b, name), square)
        yield ParameterDifference(
            parameter=name, kind=kind_of(name.rpartition(".")[0]), layer=layer_of(name), norm_a=norms[0], norm_b=norms[1],
            difference=difference, cosine=cosine, share=square / total if total else 0.0,
            introduced_a=a.introduced(name), introduced_b=b.introduced(name),
        )  # fmt: skip
