"""Compute the trainer's loss from recomputed logprobs.

Shapes: B rows, T padded response length, N response tokens in all rows, one row after the other. B1 means [B, 1].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...schemas import loss as losses
from ...schemas.errors import CannotReplay, option
from ...schemas.loss import Loss
from ...schemas.passes import CURRENT, REFERENCE, ROLLOUT, TRAIN
from .arm import GradientArm, corrected
from .update import LossRow, Update

Divisors = dict[str, tuple[float, float]]
"""Two divisors for each row (by `key_of`), applied one after the other to match the trainer's rounding."""


@dataclass(frozen=True, slots=True)
class StepLoss:
    loss: Loss
    below: str
    above: str
    """Pass whose logprobs form the numerator of the correction ratio (train / rollout)."""
    divisors: Divisors

    def __call__(self, rows: Sequence[LossRow], current_N: Any) -> Any:
        """Return these rows' share of the optimizer step's loss."""
        cells = _Cells.of(rows, current_N)
        terms, is_of_rows = self._terms(cells), self.loss.aggregation == "sequence"
        if is_of_rows and terms.shape[1] == 1:
            losses_B = terms.squeeze(-1)
        else:
            losses_B = (terms * cells.mask_BT).sum(-1)
            if is_of_rows or self.loss.aggregation == "sequence_mean":
                losses_B = losses_B / cells.mask_BT.sum(-1).clamp(min=1.0)
        pairs = [self.divisors[key_of(entry)] for entry in rows]
        first_B, second_B = (torch.tensor([pair[i] for pair in pairs]).to(losses_B) for i in range(2))
        return (losses_B / first_B / second_B).sum()

    def _terms(self, cells: _Cells) -> Any:
        """Return the loss terms [B, T] or [B, 1]. Operations run in TRL's order, since the order affects rounding."""
        loss, current_BT, advantage = self.loss, cells.current_BT, cells.advantage
        below_BT = cells.logprobs(self.below)
        # Tokens without a denominator logprob have ratio 1.
        below_BT = torch.where(below_BT.isnan(), current_BT.detach(), below_BT)
        ratio = torch.exp(_log_ratio(loss.kl_level or loss.level, current_BT, below_BT, cells.mask_BT))
        divergence = None
        if loss.kl_coefficient:  # k3: exp(d) - d - 1, or 0 without a reference logprob
            reference_BT = cells.logprobs(REFERENCE)
            reference_BT = torch.where(reference_BT.isnan(), current_BT.detach(), reference_BT)
            divergence = torch.exp(reference_BT - current_BT) - (reference_BT - current_BT) - 1
            divergence = divergence * ratio if loss.kl_weighted else divergence
        if loss.kl_level is not None:
            ratio = torch.exp(_log_ratio(loss.level, current_BT, below_BT, cells.mask_BT))
        if loss.kind == losses.CISPO:
            term = -ratio.clamp(max=loss.clip_high).detach() * advantage * current_BT
        elif loss.kind == losses.VESPO:
            term = -self._phi(cells, below_BT) * advantage * current_BT
        elif loss.kind == losses.SAPO:
            tau = torch.where(advantage > 0, loss.sapo_temperature_pos, loss.sapo_temperature_neg)
            term = -(torch.sigmoid(tau * (ratio - 1)) * 4 / tau) * advantage
        elif loss.kind == losses.REINFORCE:
            term = -(ratio * advantage)
        else:
            clipped = torch.clamp(ratio, 1 - loss.clip_low, 1 + loss.clip_high)
            if loss.clip_hard is not None:
                ratio = torch.clamp(ratio, max=loss.clip_hard)
            term = -torch.min(ratio * advantage, clipped * advantage)
        if loss.correction != "none" and loss.kind != losses.VESPO:
            term = term * self._weights(cells)
        return term if divergence is None else term + loss.kl_coefficient * divergence

    def _phi(self, cells: _Cells, below_BT: Any) -> Any:
        loss, (low, high) = self.loss, losses.VESPO_LOG_RATIO
        log_ratio_BT = torch.clamp(cells.current_BT.detach() - below_BT, -high, high)
        log_ratio_B1 = torch.sum(log_ratio_BT * cells.mask_BT, dim=-1, keepdim=True)
        if loss.correction != "none":
            log_weight = torch.clamp(torch.log(self._weights(cells)), low, high)
            log_ratio_B1 = log_ratio_B1 + torch.sum(log_weight, dim=-1, keepdim=True)
        log_ratio_B1 = torch.clamp(log_ratio_B1, low, high)
        is_positive = cells.advantage >= 0
        k = torch.where(is_positive, loss.vespo_k_pos, loss.vespo_k_neg)
        decay = torch.where(is_positive, loss.vespo_lambda_pos, loss.vespo_lambda_neg)
        decay = decay.clamp(min=losses.VESPO_LEAST_LAMBDA)
        phi = torch.exp(decay + k * log_ratio_B1 - decay * torch.exp(log_ratio_B1))
        return phi.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)

    def _weights(self, cells: _Cells) -> Any:
        """Return the correction's weights [B, T] or [B, 1]. A token without a rollout logprob has ratio 1."""
        loss = self.loss
        d = (cells.logprobs(self.above) - cells.logprobs(ROLLOUT)) * cells.mask_BT
        d = torch.where(d.isnan(), torch.zeros_like(d), d)
        if loss.correction.startswith("sequence"):
            d = d.sum(-1, keepdim=True)
        ratio = torch.exp(d)
        if loss.correction.endswith("truncate"):
            if loss.correction_low is None and loss.correction_high is None:
                return ratio
            return ratio.clamp(min=loss.correction_low, max=loss.correction_high)
        low = -np.inf if loss.correction_low is None else loss.correction_low
        high = np.inf if loss.correction_high is None else loss.correction_high
        return ratio.masked_fill((ratio < low) | (ratio > high), 0.0)


@dataclass(frozen=True, slots=True)
class _Cells:
    rows: Sequence[LossRow]
    current_BT: Any
    mask_BT: Any
    advantage: Any
    """[B, 1] (one advantage per row) or [B, T] (one per token)."""
    place: Callable[[Sequence[np.ndarray], float], Any]
    """Arranges each row's values as [B, T], padded with the given value."""

    @classmethod
    def of(cls, rows: Sequence[LossRow], current_N: Any) -> _Cells:
        lengths = [len(entry.row.response_ids) for entry in rows]
        width = max(n + entry.row.pad_right for n, entry in zip(lengths, rows, strict=True))
        cells_N = np.concatenate([np.arange(n) + index * width for index, n in enumerate(lengths)])
        cells_N = torch.from_numpy(cells_N).to(current_N.device)
        empty = current_N.new_zeros(len(rows) * width)

        def place(values: Sequence[np.ndarray], missing: float) -> Any:
            filled_N = torch.from_numpy(np.concatenate(values).astype(np.float32)).to(empty)
            return torch.full_like(empty, missing).index_copy(0, cells_N, filled_N).view(len(rows), width)

        if all(len(entry.advantage) == 1 for entry in rows):
            advantage = torch.from_numpy(np.stack([entry.advantage for entry in rows])).to(empty)
        else:
            wide = [np.broadcast_to(entry.advantage, n) for entry, n in zip(rows, lengths, strict=True)]
            advantage = place(wide, 0.0)
        current_BT = empty.index_copy(0, cells_N, current_N).view(len(rows), width)
        mask_BT = place([entry.mask for entry in rows], 0.0)
        return cls(rows=rows, current_BT=current_BT, mask_BT=mask_BT, advantage=advantage, place=place)

    def logprobs(self, name: str) -> Any:
        if name == CURRENT:
            return self.current_BT.detach()
        return self.place([entry.passes[name] for entry in self.rows], 0.0)


def _log_ratio(level: str, current_BT: Any, below_BT: Any, mask_BT: Any) -> Any:
    if level == losses.SEQUENCE_SUM:
        return ((current_BT * mask_BT).sum(-1) - (below_BT * mask_BT).sum(-1)).unsqueeze(-1)
    log_ratio_BT = current_BT - below_BT
    if level == losses.SEQUENCE_MEAN:
        return ((log_ratio_BT * mask_BT).sum(-1) / mask_BT.sum(-1).clamp(min=1.0)).unsqueeze(-1)
    return log_ratio_BT


def passes_of(loss: Loss, arm: GradientArm) -> set[str]:
    under = corrected(loss, arm.correction)
    found = {arm.logprobs or loss.denominator}
    if under.correction != "none":
        found |= {arm.logprobs or TRAIN, ROLLOUT}
    if under.kl_coefficient:
        found.add(REFERENCE)
    return found - {CURRENT}


def divisors(loss: Loss, update: Update) -> Divisors:
    places, num_rows = update.places, len(update.rows)
    is_uniform = len({len(rows) for rows in places.values()}) == 1
    found: Divisors = {}
    for rows in places.values():
        tokens = max(1.0, float(sum(entry.num_tokens for entry in rows)))
        sequences = (float(len(rows)), float(len(places))) if is_uniform else (float(num_rows), 1.0)
        if loss.aggregation == "token_mean":
            pair = (max(1.0, float(update.num_tokens)), 1.0)
        elif loss.aggregation == "batch_token_mean":
            whole = np.float32(max(1, update.step_tokens)) * np.float32(len(places))
            pair = (float(whole / np.float32(max(1, update.step_places))), 1.0)
        elif loss.aggregation == "micro_token_mean":
            pair = (tokens, float(len(places)))
        elif loss.aggregation == "constant":
            if loss.max_tokens is None:
                raise CannotReplay(
                    "loss: aggregation=constant needs max_tokens, which was not recorded; set it with "
                    f"{option('loss', 'max_tokens=N')}"
                )
            pair = (sequences[0] * loss.max_tokens, sequences[1])
        else:
            pair = sequences
        found |= {key_of(entry): pair for entry in rows}
    return found


def key_of(entry: LossRow) -> str:
    """Return a key that is unique within an optimizer step, even if a sequence occurs several times in it."""
    return f"{entry.row.seq_id} {entry.row.iteration}"
