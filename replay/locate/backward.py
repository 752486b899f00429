"""`tim-trace locate --backward`: where the gradients of two executions diverge."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...schemas.errors import CannotReplay, InvalidOption
from ...schemas.modules import has_experts
from ...schemas.steps import parse_steps
from ...tracer.located.results import BEYOND, A, B
from ...tracer.progress import Progress, no_progress
from ..arms import Arm
from ..backends import kernels
from ..backends.double import keep_double
from ..batching import ForwardBatch, PaddedBatch, check_tokens
from ..gpus import device_here
from ..gradients.arm import GradientArm, corrected, parse_gradient_arm
from ..gradients.engine import loss_of
from ..gradients.loss import StepLoss, divisors, passes_of
from ..gradients.scorer import GradientScorer
from ..gradients.update import LossRow, Update, hyperparameters, loss_steps, updates
from ..recorded import RecordedRun
from ..settings import settings
from .backward_reference import BackwardReference, JudgedGradient
from .backward_results import PARAMETER, BackwardError, BackwardLocation, ParameterDifference, gradient_shares
from .backward_taps import STREAM, BackwardCall, BackwardTaps
from .bounds import unit
from .chosen import choose
from .engine import REFERENCE
from .execution import Prepare
from .names import kind_of, layer_of


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
) -> BackwardLocation:
    """Find where the gradients of two executions of recorded sequences diverge: `tim-trace locate --backward`.

    The chosen sequences' share of the recorded loss is differentiated through a, `arm` (by default as recorded), and b,
    `against` (by default in float64), both arms as in `gradient`, in the recorded forwards of the sequences. For each
    operator, the gradient that it passes on and the gradients of its parameters are compared with float64 on the same
    inputs and with the execution's own weights, so that earlier errors do not count. The divergence is the first
    operator in the backward pass that exceeds its bound (module `backward_bounds`).

    `steps` selects one step, of which the first optimizer step is used. `loss` sets fields of the loss missing in the
    trace. `prepare` and `prepare_against` modify the model of a and b after its weights are loaded. The other options
    are those of `locate`.

    Nothing is written. Raises CannotReplay, WeightsMissing, DamagedTrace, InvalidOption, TraceNotFound.
    """
    arms = {side: parse_gradient_arm(text) if text else GradientArm() for side, text in ((A, arm), (B, against))}
    run = RecordedRun(trace, model_factory=model_factory, weights_from=weights_from)
    other = RecordedRun(trace, model_factory=against_factory, weights_from=weights_from)
    asked = parse_steps(steps, loss_steps(run))
    if len(asked) != 1:
        raise InvalidOption(f"{steps!r} selects {len(asked)} steps; give one", option="steps")
    recorded = loss_of(run, hyperparameters(run), loss)
    passes = {name for each in arms.values() for name in passes_of(recorded, each)}
    update = updates(run, asked[0], passes, {})[0]
    rows = [entry.row for entry in update.rows]
    check_tokens(rows, run.model["config"])
    chosen = choose(run, asked[0], rows, sequences)
    contract = run.train_contract(update.contract, update.loss_pass)
    names = {row.seq_id for row in chosen.rows}
    a, b = (
        _Side(each, arms[side], contract, update, names, change)
        for side, each, change in ((A, run, prepare), (B, other, prepare_against))
    )
    with progress("taking gradients", len(a.parts) + len(b.parts)) as advance:
        for side, each in ((A, a), (B, b)):
            step_loss = _loss(recorded, arms[side], update)
            for part in each.parts:
                each.take(part, step_loss)
                advance(1)
    operators = (*a.errors(A), *b.errors(B))
    beyond = (each for each in operators if each.ratio > BEYOND)
    parameters = list(_differences(a, b))
    norm_a, norm_b = _norm(a.gradients), _norm(b.gradients)
    dot = sum(_dot(a, b, name) for name in a.every)
    difference, cosine = _apart(norm_a, norm_b, dot, sum(_square_off(a, b, name) for name in a.every))
    return BackwardLocation(
        run=run.store.name, step=asked[0], policy_version=update.policy_version, a=arms[A].name, b=arms[B].name,
        chosen=chosen.how, num_sequences=len(names),
        num_tokens=sum(entry.num_tokens for entry in update.rows if entry.row.seq_id in names),
        norm_a=norm_a, norm_b=norm_b, difference=difference, cosine=cosine,
        first=min(beyond, key=lambda each: each.order, default=None),
        kinds=tuple(gradient_shares(parameters, operators, lambda each: (each.kind, None))),
        layers=tuple(gradient_shares(parameters, operators, lambda each: ("", each.layer))),
        parameters=tuple(sorted(parameters, key=lambda each: -each.share)), operators=operators,
    )  # fmt: skip


def _loss(recorded: Any, arm: GradientArm, update: Update) -> StepLoss:
    loss = corrected(recorded, arm.correction)
    below = arm.logprobs or loss.denominator
    if arm.logprobs is None and below == "train" and update.own_ratio:
        below = "current"
    return StepLoss(loss, below, arm.logprobs or "train", divisors(loss, update))


@dataclass(frozen=True, slots=True)
class _Part:
    """One forward that contains chosen sequences."""

    batch: ForwardBatch
    chosen: list[tuple[LossRow, slice]]
    """Rows of the forward, each with its slice of [N]."""

    def loss(self, loss: StepLoss, current_N: Any) -> Any:
        """Return the chosen rows' share of the loss."""
        import torch

        taken = torch.cat([current_N[span] for _, span in self.chosen])
        return loss([entry for entry, _ in self.chosen], taken)


class _Side:
    """One execution: its forwards and backwards, and the errors they introduce."""

    def __init__(
        self,
        run: RecordedRun,
        arm: GradientArm,
        contract: Any,
        update: Update,
        names: set[str],
        prepare: Prepare | None,
    ):

        device = device_here()
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
                f"arm {arm.name}: the model has dropout in training, which no other forward can repeat; leave "
                "--backward out, or record a model without dropout"
            )
        if any(config.get("use_dora") for config in (run.model.get("adapters") or {}).values()):
            raise CannotReplay(
                f"{run.store.url}: gradients of DoRA magnitudes have no error bound; leave --backward out"
            )
        if has_experts(run.model["config"]):
            raise CannotReplay(
                f"{run.store.url}: the backward of a mixture of experts has no error bound; leave --backward out"
            )
        self.parts = list(self._parts(update, names))
        shape = {name: getattr(forward, name) for name in ("batch_size", "batch_tokens", "padding", "temperature")}
        plain = Arm(dtype="fp64", attention="eager", **shape)
        self._reference = BackwardReference(GradientScorer(run, plain, contract, device), tensors, self.model)
        self.every = [name for name, _ in self.model.named_parameters()]
        self.gradients: dict[str, Any] = {}
        self._judged: dict[str, list[tuple[int, JudgedGradient]]] = {}
        """Operator -> its position in the backward pass and the compared gradient, for each forward."""

    def _parts(self, update: Update, names: set[str]) -> Iterator[_Part]:
        for rows in update.places.values():
            for batch, entries in self.scorer._forwards(rows):
                if not isinstance(batch, PaddedBatch):
                    raise CannotReplay(
                        f"arm {self.scorer.arm.name}: gradients can only be compared in padded forwards; use padding=left or padding=right"
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
        """Run one forward and backward, and compare it with float64."""
        import torch

        scorer = self.scorer
        taps, logprobs = BackwardTaps(self.model), BackwardCall()
        self.model.zero_grad(set_to_none=True)
        dtype = next(self.model.parameters()).dtype
        with (
            settings(scorer.contract["torch"], scorer.arm),
            kernels.forced(scorer.arm.attention),
            torch.enable_grad(),
            keep_double() if dtype == torch.float64 else nullcontext(),
            taps.listening(),
        ):
            current_N = scorer._differentiable(part.batch)
            logprobs.gives = [current_N.detach().clone()]
            current_N.register_hook(lambda gradient: logprobs.came.update({0: gradient.detach().clone()}))
            value = part.loss(loss, current_N)
            taps.is_on = False
            value.backward()
        gradients = {name: each.grad.detach() for name, each in scorer.parameters.items() if each.grad is not None}
        for name, gradient in gradients.items():
            known = self.gradients.get(name)
            self.gradients[name] = gradient.double() if known is None else known + gradient.double()
        # Under autocast the head's projection has a narrower dtype than its input.
        made = scorer.numerics
        head_dtype = max(
            (each for each in (made.projection_dtype, made.logits_dtype, dtype) if each is not None), key=unit
        )
        judged = self._reference.judge(
            part.batch, taps.calls, logprobs, gradients, lambda current: part.loss(loss, current), head_dtype
        )
        places: dict[str, int] = {}
        for each in judged:
            place = places.setdefault(each.operator, len(places))
            self._judged.setdefault(each.operator, []).append((place, each))
        self.model.zero_grad(set_to_none=True)

    def introduced(self, parameter: str) -> float | None:
        """Return the relative error norm of a parameter's gradient, the largest over all forwards."""
        found = [each for _, each in self._judged.get(parameter.rpartition(".")[0], []) if each.what == PARAMETER]
        return max((each.error / each.size for each in found if each.size), default=None)

    def errors(self, side: str) -> Iterator[BackwardError]:
        """Yield the error introduced by each operator, in backward order."""
        rows = []
        for operator, found in self._judged.items():
            worst = max((each for _, each in found), key=lambda each: each.ratio)
            rows.append(
                BackwardError(
                    side=side,
                    order=min(place for place, _ in found),
                    operator=operator,
                    kind=STREAM if operator.endswith(f".{STREAM}") else kind_of(operator.removesuffix(".output")),
                    layer=layer_of(operator),
                    what=worst.what,
                    dtype=worst.dtype,
                    introduced=max((each.error / each.size for _, each in found if each.size), default=0.0),
                    ratio=worst.ratio,
                )
            )
        yield from sorted(rows, key=lambda row: row.order)


def _norm(gradients: Mapping[str, Any]) -> float:
    return float(np.sqrt(sum(float(each.square().sum()) for each in gradients.values())))


def _dot(a: _Side, b: _Side, name: str) -> float:
    """Return the dot product of both gradients of a parameter."""
    ours, theirs = a.gradients.get(name), b.gradients.get(name)
    return 0.0 if ours is None or theirs is None else float((ours * theirs).sum())


def _square_off(a: _Side, b: _Side, name: str) -> float:
    """Return |a - b|^2 of a parameter's gradient."""
    ours, theirs = a.gradients.get(name), b.gradients.get(name)
    if ours is None or theirs is None:
        return sum(float(each.square().sum()) for each in (ours, theirs) if each is not None)
    return float((ours - theirs).square().sum())


def _apart(norm_a: float, norm_b: float, dot: float, square: float) -> tuple[float | None, float | None]:
    """Return |a - b| / |a|, and the cosine."""
    difference = float(np.sqrt(square)) / norm_a if norm_a else None
    return difference, dot / (norm_a * norm_b) if norm_a and norm_b else None


def _differences(a: _Side, b: _Side) -> Iterator[ParameterDifference]:
    squares = {name: _square_off(a, b, name) for name in a.every}
    total = sum(squares.values())
    for name, square in squares.items():
        norm_a, norm_b = (_norm({name: side.gradients[name]}) if name in side.gradients else 0.0 for side in (a, b))
        difference, cosine = _apart(norm_a, norm_b, _dot(a, b, name), square)
        yield ParameterDifference(
            parameter=name, kind=kind_of(name.rpartition(".")[0]), layer=layer_of(name), norm_a=norm_a, norm_b=norm_b,
            difference=difference, cosine=cosine, share=square / total if total else 0.0,
            introduced_a=a.introduced(name), introduced_b=b.introduced(name),
        )  # fmt: skip
