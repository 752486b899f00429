"""One optimizer step under each arm in turn. Each arm's gradient is compared with that of the first arm, the reference.

Shapes: n micro-batches, M kinds of modules.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...schemas.modules import KINDS
from ...tracer.staging import to_numpy
from ..batching import ForwardBatch, responses
from ..differences import differences
from .arm import GradientArm
from .loss import StepLoss
from .results import GradientStep, ModuleGradient, same_digits
from .scorer import GradientScorer
from .sums import Pair, Sums, add, total_norm
from .update import Update

ALL = "all"
LEAST_MICRO_BATCHES = 4
"""Minimum number of micro-batches for the variance."""


class StepPasses:
    """Computation of one optimizer step's gradient under several arms. The first arm's gradient is the reference for
    the others."""

    def __init__(
        self,
        update: Update,
        *,
        logged_norm: float | None,
        accumulated: float | None,
    ):
        self.update = update
        self._logged, self._accumulated = logged_norm, accumulated
        self._sums: Sums | None = None
        self._reference: list[Any] | None = None

    def take(self, arm: GradientArm, scorer: GradientScorer, loss: StepLoss) -> GradientStep:
        """Return the results of an arm, computed with the weights that its scorer has loaded. Raises CannotReplay."""
        if self._sums is None:
            parameters = scorer.parameters
            self._sums = Sums(list(parameters), [parameter.numel() for parameter in parameters.values()])
        seen = _Seen()
        total, squares = self._gradient(self._sums, scorer, loss, seen)
        self._reference = self._reference or total
        pair = self._sums.pair(total, self._reference)
        whole, *kinds = modules(self._sums, pair, squares)
        norm = total_norm(total)
        is_recording = arm.is_identity
        reproduced = same_digits(norm, self._logged) if is_recording and self._logged is not None else None
        return GradientStep(
            step=self.update.step,
            policy_version=self.update.policy_version,
            arm=arm.name,
            num_sequences=len(self.update.rows),
            num_tokens=self.update.num_tokens,
            grad_norm=norm,
            logged_norm=self._logged,
            reproduced=reproduced,
            forward_held=seen.held,
            num_micro_batches=len(squares),
            whole=whole,
            modules=tuple(kinds),
            notes=tuple(self._notes(scorer, loss, seen, norm, reproduced)) if is_recording else (),
        )

    def _gradient(
        self, sums: Sums, scorer: GradientScorer, loss: StepLoss, seen: _Seen
    ) -> tuple[list[Any], list[np.ndarray]]:
        """Return the gradient, and the squared norms [M] of each micro-batch's share if there are enough micro-batches
        for statistics.
        """
        total: list[Any] | None = None
        squares = []
        places = self.update.places.values()
        for rows in places:
            found = scorer.gradient(rows, loss, seen)
            if len(places) >= LEAST_MICRO_BATCHES:
                squares.append(sums.squares(found))
            total = add(total, found)
        return total or [], squares

    def _notes(
        self, scorer: GradientScorer, loss: StepLoss, seen: _Seen, norm: float, reproduced: bool | None
    ) -> list[str]:
        update = self.update
        notes = list(update.notes)
        if not np.isfinite(norm):
            notes.append(f"the gradient is not finite ({norm})")
        if update.metric_step is None:
            notes.append("its grad norm cannot be distinguished from those of the step's other updates")
        if scorer.substitution is not None:
            notes.append(f"the recorded code does not run here ({scorer.substitution}), so other code was used")
        if reproduced is False:
            notes += list(self._why(scorer, loss, seen))
        return notes

    def _why(self, scorer: GradientScorer, loss: StepLoss, seen: _Seen) -> list[str]:
        """Return the known reasons why the gradient norm differs from the logged one."""
        update, why = self.update, []
        if loss.loss.unknown:
            why.append(f"the loss has unknown settings: {', '.join(loss.loss.unknown)}")
        if not update.composition_known:
            why.append("the rows of each micro-batch were not recorded")
        writers = len({writer for writer, _ in update.places})
        if writers > 1:
            why.append(f"{writers} processes computed it, and the summation order differs here")
        if self._accumulated and update.composition_known and len(update.places) < self._accumulated * writers:
            why.append(
                f"only {len(update.places)} of the {int(self._accumulated) * writers} micro-batches of an optimizer step "
                "were recorded"
            )
        if scorer.has_dropout:
            why.append("the model uses dropout, as in the recording")
        config = scorer.run.model["config"]
        if config.get("output_router_logits") or config.get("router_aux_loss_coef"):
            why.append("the routers' auxiliary loss, if the trainer added it, is not included")
        if scorer.rows_left:
            why.append(f"memory ran out; forwards had {scorer.rows_left} rows")
        why += list(differences(scorer.contract, scorer.made_by()))
        why.append(
            "the forward reproduced the recorded logprobs bit for bit"
            if seen.held
            else f"the forward's logprobs differ from the recorded ones by up to {seen.largest:.2g} nats"
        )
        return why


class _Seen:
    """Comparison between the logprobs of the forward passes and the recorded logprobs."""

    def __init__(self) -> None:
        self.held = True
        self.largest = 0.0

    def __call__(self, batch: ForwardBatch, current_N: Any) -> None:
        for row, values in zip(batch.rows, responses(batch, to_numpy(current_N.detach().cpu())), strict=True):
            recorded, found = row.logprobs[row.scored], values[row.scored]
            same = found.dtype == np.float32 and np.array_equal(recorded.view(np.uint32), found.view(np.uint32))
            if not same:
                self.held = False
                off = np.abs(found.astype(np.float64) - recorded.astype(np.float64))
                self.largest = max(self.largest, float(np.max(off, initial=0.0)))


def modules(sums: Sums, pair: Pair, squares: Sequence[np.ndarray]) -> tuple[ModuleGradient, ...]:
    """Return the comparison with the reference gradient for the whole model, then for each kind of module in the
    model."""
    variances = _variances(pair.aa, squares)
    chosen = [(ALL, np.ones(len(KINDS), bool))]
    chosen += [(kind, np.arange(len(KINDS)) == i) for i, kind in enumerate(KINDS) if sums.num_parameters[i]]
    return tuple(_module(name, int(sums.num_parameters[mask].sum()), pair, variances, mask) for name, mask in chosen)


def _module(name: str, size: int, pair: Pair, variances_M: np.ndarray | None, mask: np.ndarray) -> ModuleGradient:
    aa, ar, rr, dd = (float(values[mask].sum()) for values in (pair.aa, pair.ar, pair.rr, pair.dd))
    return ModuleGradient(
        module=name,
        num_parameters=size,
        norm=math.sqrt(aa),
        cosine=ar / math.sqrt(aa * rr) if aa and rr else None,
        norm_ratio=math.sqrt(aa / rr) if rr else None,
        bias=math.sqrt(dd),
        variance=None if variances_M is None else float(variances_M[mask].sum()),
    )


def _variances(aa_M: np.ndarray, squares: Sequence[np.ndarray]) -> np.ndarray | None:
    """Return the sum [M] over micro-batches of |n a_i - a|^2 / (n (n - 1)) = (n sum |a_i|^2 - |a|^2) / (n - 1)."""
    n = len(squares)
    if n < 2:
        return None
    squares_M = np.sum(squares, axis=0)
    return np.asarray(np.maximum(n * squares_M - aa_M, 0.0) / (n - 1))
