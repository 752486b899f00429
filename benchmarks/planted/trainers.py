"""Trainers: models that score whole sequences at once.

Shapes: B sequences, P prompt tokens, T response tokens, N tokens, V vocabulary, L layers, S experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from heads import Head
from sides import Side, build, last_hidden, output_logits, router_choices
from torch import Tensor

_HEAD_CHUNK = 1024
"""Number of tokens whose logits are in memory at once."""


@dataclass(slots=True)
class Scored:
    """A trainer's results for whole sequences."""

    logprobs: Tensor
    """[B, T] float32 nats, 0.0 beyond a response."""
    entropy: Tensor
    """[B, T] float32 nats, entropy of the same distribution."""
    experts: Tensor | None = None
    """[B, P + T - 1, L, S] chosen experts; None without routers."""


@torch.no_grad()
def score(side: Side, prompts_BP: Tensor, ids_BT: Tensor, lengths_B: Tensor) -> Scored:
    """Score responses with forwards over whole sequences, `side.rows` at a time."""
    model = build(side)
    width = prompts_BP.shape[1]
    logprobs, entropy = torch.zeros(ids_BT.shape), torch.zeros(ids_BT.shape)
    experts = []
    for rows in torch.arange(len(ids_BT)).split(side.rows):
        longest = int(lengths_B[rows].max())
        whole = torch.cat([prompts_BP[rows], ids_BT[rows, :longest]], 1)
        with router_choices(model) as seen:
            hidden = last_hidden(model, side, whole[:, :-1], 0, None)[:, width - 1 :]
        counted = torch.arange(longest)[None] < lengths_B[rows, None]
        values = [
            _token_scores(output_logits(model, side, part), token, side.head)
            for part, token in zip(
                hidden[counted].split(_HEAD_CHUNK), ids_BT[rows, :longest][counted].split(_HEAD_CHUNK), strict=True
            )
        ]
        at = torch.zeros(ids_BT.shape, dtype=torch.bool)
        at[rows[:, None], torch.arange(longest)] = counted
        logprobs[at] = torch.cat([value[0] for value in values])
        entropy[at] = torch.cat([value[1] for value in values])
        if seen:
            experts.append(
                _padded([part[0].view(len(rows), -1, part[0].shape[-1]) for part in seen], ids_BT.shape[1] + width - 1)
            )
    return Scored(logprobs, entropy, torch.cat(experts) if experts else None)


def _token_scores(logits: Tensor, token: Tensor, head: Head) -> tuple[Tensor, Tensor]:
    scores = head.log_softmax(logits)
    probs = scores.exp()
    return scores.gather(-1, token[:, None])[:, 0], -(probs * scores.masked_fill(probs == 0, 0.0)).sum(-1)


def _padded(layers: list[Tensor], tokens: int) -> Tensor:
    """Stack layers of [B, t, S] into [B, tokens, L, S], with -1 beyond t."""
    chosen = torch.stack(layers, 2)
    return torch.nn.functional.pad(chosen, (0, 0, 0, 0, 0, tokens - chosen.shape[1]), value=-1)
