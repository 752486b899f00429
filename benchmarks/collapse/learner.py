"""The trainer: advantages, loss and optimizer updates.

Shapes: B rows, P prompt tokens, T response tokens, L = P + T.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from engine import Rollout
from schedules import Schedule
from switches import Switches
from tim_trace.schemas.loss import Loss
from torch import Tensor

GROUP = 8
_LARGEST_NORM = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """How rewards become updates."""

    name: str
    loss: Loss
    divides_by_spread: bool
    num_minibatches: int
    """Number of optimizer updates per step."""


ALGORITHMS = {
    "reinforce": Algorithm(name="reinforce", loss=Loss(kind="reinforce"), divides_by_spread=False, num_minibatches=1),
    "grpo": Algorithm(name="grpo", loss=Loss(kind="ppo_clip"), divides_by_spread=True, num_minibatches=2),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """Inputs and results of one optimizer update."""

    rows: Tensor
    logprobs: Tensor
    """[rows, T] of the `current` pass."""
    loss: float
    grad_norm: float
    """Before clipping."""
    entropy: float


class Learner:
    """Stores the trained weights and their optimizer."""

    def __init__(self, model: Any, algorithm: Algorithm, switches: Switches, rate: float):
        self.model = model
        self.algorithm = algorithm
        self.switches = switches
        self.rate = rate * switches.rate_factor
        self.schedule = Schedule(switches.schedule)
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=self.rate, betas=switches.betas, eps=switches.epsilon, weight_decay=0.0
        )
        self.version = 0

    def set_rate(self, progress: float) -> float:
        """Return the learning rate after a share of the run, including the spike and the schedule."""
        spiked = self.switches.rate_spike != 1.0 and 0.5 <= progress < 0.6
        rate = self.rate * (self.switches.rate_spike if spiked else 1.0) * self.schedule.factor(progress)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    @torch.no_grad()
    def score(self, prompt_BP: Tensor, rollout: Rollout) -> Tensor:
        """Return [B, T] logprobs under the current weights: the `train` pass."""
        return self._forward(prompt_BP, rollout.ids)[0]

    def learn(
        self,
        prompt_BP: Tensor,
        rollout: Rollout,
        train_BT: Tensor,
        advantage_B: Tensor,
        before: Callable[[], None] | None = None,
    ) -> list[Update]:
        """Perform the optimizer updates of one step; `before` is called before each."""
        weight_BT = self.correction(train_BT, rollout)
        self.schedule.observe(float(rollout.mask.sum(1).float().mean()))
        updates = []
        for rows in torch.arange(len(prompt_BP)).view(self.algorithm.num_minibatches, -1):
            if before is not None:
                before()
            updates.append(self._update(rows, prompt_BP, rollout, train_BT, advantage_B, weight_BT))
        return updates

    def correction(self, train_BT: Tensor, rollout: Rollout) -> Tensor:
        """Return the [B, T] factors of each token's loss."""
        kind, cap = self.switches.correction, self.switches.correction_cap
        d_BT = torch.where(rollout.mask, train_BT - rollout.logprobs, 0.0)
        if kind == "none":
            return torch.ones_like(d_BT)
        if kind == "token_truncate":
            return d_BT.exp().clamp(max=cap)
        if kind == "token_mask":
            return torch.where(d_BT.exp() <= cap, d_BT.exp(), 0.0)
        ratio_B1 = d_BT.sum(1, keepdim=True).exp()
        return torch.where(ratio_B1 <= cap, ratio_B1, 0.0).expand_as(d_BT)

    def _update(
        self,
        rows: Tensor,
        prompt_BP: Tensor,
        rollout: Rollout,
        train_BT: Tensor,
        advantage_B: Tensor,
        weight_BT: Tensor,
    ) -> Update:
        mask = rollout.mask[rows]
        logprobs, entropy = self._forward(prompt_BP[rows], rollout.ids[rows])
        ratio = (logprobs - train_BT[rows]).exp()
        advantage = advantage_B[rows, None]
        terms = ratio * advantage
        if self.algorithm.loss.kind == "ppo_clip":
            low, high = 1 - self.algorithm.loss.clip_low, 1 + self.algorithm.loss.clip_high
            terms = torch.minimum(terms, ratio.clamp(low, high) * advantage)
        loss = -(terms * weight_BT[rows])[mask].sum() / mask.sum()
        mean_entropy = entropy[mask].mean()
        total = loss - self.switches.entropy_coefficient * mean_entropy
        self.optimizer.zero_grad()
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), _LARGEST_NORM)
        self.optimizer.step()
        self.version += 1
        return Update(
            rows=rows,
            logprobs=logprobs.detach(),
            loss=float(loss.detach()),
            grad_norm=float(norm),
            entropy=float(mean_entropy.detach()),
        )

    def _forward(self, prompt_BP: Tensor, ids_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Return [B, T] logprobs and entropies of a response."""
        ids_BL = torch.cat([prompt_BP, ids_BT], 1)
        logits_BTV = self.model(input_ids=ids_BL[:, :-1], use_cache=False).logits[:, prompt_BP.shape[1] - 1 :]
        logprobs_BTV = logits_BTV.log_softmax(-1)
        entropy_BT = -(logprobs_BTV.exp() * logprobs_BTV).sum(-1)
        return logprobs_BTV.gather(-1, ids_BT[..., None])[..., 0], entropy_BT


def advantages(reward_B: Tensor, algorithm: Algorithm) -> Tensor:
    """Return [B] rewards minus their group's mean, divided by its standard deviation if the algorithm requires it."""
    by_group = reward_B.view(-1, GROUP)
    centred = by_group - by_group.mean(1, keepdim=True)
    if algorithm.divides_by_spread:
        centred = centred / (by_group.std(1, keepdim=True) + 1e-4)
    return centred.flatten()
