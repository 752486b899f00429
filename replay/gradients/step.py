"""Compute one optimizer step's gradient in several arms, and compare the gradients.

Shapes: n micro-batches, M module kinds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from ...schemas.documents import differences
from ...schemas.modules import KINDS, kind_of
from ...tracer.staging import to_numpy
from ..batching import ForwardBatch, responses
from .arm import GradientArm
from .loss import StepLoss
from .results import GradientStep, ModuleGradient, same_digits
from .scorer import GradientScorer
from .update import Update

ALL = "all"
LEAST_MICRO_BATCHES = 4
_PIECE = 1 << 24

Gradient = Sequence[Any]
"""One tensor per parameter, or None for a parameter without a gradient."""


class StepPasses:
    """Computes an optimizer step's gradient in several arms. The first arm is the reference."""

    def __init__(self, update: Update, *, logged_norm: float | None, accumulated: float | None):
        self.update = update
        self._logged, self._accumulated = logged_norm, accumulated
        self._reference: list[Any] | None = None

    def take(self, arm: GradientArm, scorer: GradientScorer, loss: StepLoss) -> GradientStep:
        kinds = [KINDS.index(kind_of(name)) for name in scorer.parameters]
        sizes = np.bincount(kinds, [each.numel() for each in scorer.parameters.values()], len(KINDS)).astype(np.int64)
        seen, total, squares = _Seen(), list[Any](), list[np.ndarray]()
        places = self.update.places.values()
        for rows in places:
            found = scorer.gradient(rows, loss, seen)
            if len(places) >= LEAST_MICRO_BATCHES:
                squares.append(squares_of(kinds, found))
            total = _add(total, found)
        self._reference = self._reference or total
        whole, *parts = modules(sizes, products(kinds, total, self._reference), squares)
        # Call the function that clip_grad_norm_ uses, so that the norm has the same bits as the one logged in training.
        norm = float(torch.nn.utils.get_total_norm([values for values in total if values is not None]))
        is_recording = arm.is_identity
        reproduced = same_digits(norm, self._logged) if is_recording and self._logged is not None else None
        return GradientStep(
            step=self.update.step, policy_version=self.update.policy_version, arm=arm.name,
            num_sequences=len(self.update.rows), num_tokens=self.update.num_tokens, grad_norm=norm,
            logged_norm=self._logged, reproduced=reproduced, forward_held=seen.held, num_micro_batches=len(squares),
            whole=whole, modules=tuple(parts),
            notes=tuple(self._notes(scorer, loss, seen, norm, reproduced)) if is_recording else (),
        )  # fmt: skip

    def _notes(
        self, scorer: GradientScorer, loss: StepLoss, seen: _Seen, norm: float, reproduced: bool | None
    ) -> Iterator[str]:
        update = self.update
        yield from update.notes
        if not np.isfinite(norm):
            yield f"the gradient is not finite ({norm})"
        if update.metric_step is None:
            yield "the step has several updates, and it is unclear which logged grad norm belongs to this one"
        if scorer.substitution is not None:
            yield f"the recorded code cannot run here ({scorer.substitution}), so a substitute was used"
        if reproduced is not False:
            return
        if loss.loss.unknown:
            yield f"the loss has unknown settings: {', '.join(loss.loss.unknown)}"
        if not update.composition_known:
            yield "micro-batches were not recorded"
        writers = len({writer for writer, _ in update.places})
        if writers > 1:
            yield f"{writers} processes computed the gradient, so the summation order differs here"
        if self._accumulated and update.composition_known and len(update.places) < self._accumulated * writers:
            yield (
                f"only {len(update.places)} of {int(self._accumulated) * writers} micro-batches per optimizer step "
                "were recorded"
            )
        if scorer.has_dropout:
            yield "the recorded pass uses dropout"
        config = scorer.run.model["config"]
        if config.get("output_router_logits") or config.get("router_aux_loss_coef"):
            yield "the recomputed loss omits the routers' auxiliary loss, which the trainer may have added"
        if scorer.rows_left:
            yield f"ran out of memory, so forward passes were limited to {scorer.rows_left} rows"
        yield from differences(scorer.contract, scorer.made_by())
        yield (
            "the forward pass reproduced the recorded logprobs bit for bit"
            if seen.held
            else f"the forward pass's logprobs differ from the recorded logprobs by up to {seen.largest:.2g} nats"
        )


class _Seen:
    def __init__(self) -> None:
        self.held = True
        self.largest = 0.0

    def __call__(self, batch: ForwardBatch, current_N: Any) -> None:
        for row, values in zip(batch.rows, responses(batch, to_numpy(current_N.detach().cpu())), strict=True):
            recorded, found = row.logprobs[row.scored], values[row.scored]
            if found.dtype != np.float32 or not np.array_equal(recorded.view(np.uint32), found.view(np.uint32)):
                self.held = False
                off = np.abs(found.astype(np.float64) - recorded.astype(np.float64))
                self.largest = max(self.largest, float(np.max(off, initial=0.0)))


def squares_of(kinds: Sequence[int], gradient: Gradient) -> np.ndarray:
    squares = np.zeros(len(KINDS))
    for kind, values in zip(kinds, gradient, strict=True):
        if values is not None:
            squares[kind] += float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2
    return squares


def products(kinds: Sequence[int], arm: Gradient, reference: Gradient) -> np.ndarray:
    """Return the sums of a^2, a r, r^2 and (a - r)^2 (a: arm, r: reference) per module kind, float64 [4, M]."""
    sums = np.zeros((4, len(KINDS)))
    for kind, a, r in zip(kinds, arm, reference, strict=True):
        if a is not None or r is not None:
            sums[:, kind] += _products(a, r)
    return sums


def modules(sizes: np.ndarray, products: np.ndarray, squares: Sequence[np.ndarray]) -> Iterator[ModuleGradient]:
    n, variances_M = len(squares), None
    if n > 1:  # the sum over micro-batches of |n a_i - a|^2 / (n (n - 1))
        variances_M = np.maximum(n * np.sum(squares, axis=0) - products[0], 0.0) / (n - 1)
    chosen = [(ALL, np.ones(len(KINDS), bool))]
    chosen += [(kind, np.arange(len(KINDS)) == i) for i, kind in enumerate(KINDS) if sizes[i]]
    for name, mask in chosen:
        aa, ar, rr, dd = (float(values[mask].sum()) for values in products)
        yield ModuleGradient(
            module=name,
            num_parameters=int(sizes[mask].sum()),
            norm=math.sqrt(aa),
            cosine=ar / math.sqrt(aa * rr) if aa and rr else None,
            norm_ratio=math.sqrt(aa / rr) if rr else None,
            bias=math.sqrt(dd),
            variance=None if variances_M is None else float(variances_M[mask].sum()),
        )


def _add(total: list[Any], gradient: list[Any]) -> list[Any]:
    if not total:
        return gradient
    both = [(one, other) for one, other in zip(total, gradient, strict=True) if one is not None and other is not None]
    if both:
        torch._foreach_add_([one for one, _ in both], [other for _, other in both])
    return [other if one is None else one for one, other in zip(total, gradient, strict=True)]


def _products(a: Any, r: Any) -> np.ndarray:
    a = torch.zeros_like(r) if a is None else a.to(r.device if r is not None else a.device)
    r = torch.zeros_like(a) if r is None else r
    sums = torch.zeros(4, dtype=torch.float64)
    for one, other in zip(a.reshape(-1).split(_PIECE), r.reshape(-1).split(_PIECE), strict=True):
        one, other = one.double(), other.double()
        off = one - other
        sums += torch.stack([one @ one, one @ other, other @ other, off @ off]).cpu()
    return np.asarray(sums.numpy())
