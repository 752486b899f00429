"""Engines: models that sample token by token with a cache.

Shapes: B sequences, P prompt tokens, T response tokens, H hidden units, V vocabulary, L layers, S experts.
"""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass

import torch
from heads import Sampling
from language import EOS, PAD
from sides import Side, build, last_hidden, output_logits, router_choices, routers, told
from torch import Tensor
from transformers import DynamicCache


@dataclass(slots=True)
class Decoded:
    """Tokens that an engine sampled or was given, with its logprobs."""

    ids: Tensor
    """[B, T] int64, PAD after the end token."""
    lengths: Tensor
    """[B] number of response tokens, including the end token."""
    logprobs: Tensor
    """[B, T] float32 nats, 0.0 after the end token."""
    experts: Tensor | None = None
    """[B, P + T - 1, L, S] experts chosen for every token that went through the model; None without routers."""


@torch.no_grad()
def decode(
    side: Side,
    prompts_BP: Tensor,
    max_tokens: int,
    *,
    sampling: Sampling | None = None,
    generator: torch.Generator | None = None,
    forced_BT: Tensor | None = None,
    lengths_B: Tensor | None = None,
    injected_BT: Tensor | None = None,
) -> Decoded:
    """Sample responses token by token with a cache, or score given ones with the same steps.

    `injected_BT` inserts tokens from elsewhere, such as a tool's output, where it is not -1. The steps run until the
    longest response ends, with all rows in one batch, so that forcing an engine's own tokens reproduces its
    log-probabilities bit for bit.
    """
    forced = forced_BT is not None
    steps = forced_BT.shape[1] if forced else max_tokens
    engine = _Engine(side, prompts_BP)
    done = torch.zeros(len(prompts_BP), dtype=torch.bool)
    hidden = engine.prefill()
    vocabulary = engine.vocabulary
    ids, logprobs = [], []
    for step in range(steps):
        logits = engine.logits(hidden)
        scores = side.head.log_softmax(logits)
        if forced:
            token = forced_BT[:, step]
        else:
            drawn = sampling.process(logits[:, :vocabulary]).softmax(-1)
            token = _drawn(drawn, generator)
            if injected_BT is not None:
                token = torch.where(injected_BT[:, step] >= 0, injected_BT[:, step], token)
            token = token.masked_fill(done, PAD)
        ids.append(token)
        logprobs.append(
            scores.gather(-1, token[:, None])[:, 0].masked_fill(done if not forced else step >= lengths_B, 0.0)
        )
        done = done | (token == EOS)
        if not forced and bool(done.all()):
            break
        if step + 1 < steps:
            hidden = engine.step(token, step)
    tokens = torch.stack(ids, 1)
    ended = (tokens == EOS).int()
    found = torch.where(ended.any(1), ended.argmax(1) + 1, tokens.shape[1])
    return Decoded(tokens, lengths_B if forced else found, torch.stack(logprobs, 1), engine.experts())


def _drawn(probs: Tensor, generator: torch.Generator | None) -> Tensor:
    """Sample a token [B] from each row of probabilities [B, V], by inverting the cumulative distribution."""
    mass = probs.double().cumsum(-1)
    place = torch.rand(len(probs), 1, generator=generator, dtype=torch.float64) * mass[:, -1:]
    return torch.searchsorted(mass, place, right=True)[:, 0].clamp(max=probs.shape[-1] - 1)


class _Engine:
    """A model with its cache, or two models that share a cache while weights are swapped."""

    def __init__(self, side: Side, prompts_BP: Tensor):
        self.side, self.prompts = side, prompts_BP
        self.model = build(side)
        self.later = None if side.swap is None else build(side, side.swap[0])
        self.vocabulary = self.model.config.vocab_size
        self.position = prompts_BP.shape[1]
        self._stack = contextlib.ExitStack()
        self._seen = self._stack.enter_context(router_choices(self.model))
        self._cache = DynamicCache()
        self._tell_routers()
        self._took: Tensor | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        """Map [B, H] to [B, V], each row with the weights that it has reached."""
        logits = output_logits(self.model, self.side, hidden)
        if self._took is None:
            return logits
        return torch.where(self._took[:, None], output_logits(self.later, self.side, hidden), logits)

    def prefill(self) -> Tensor:
        """Return last hidden states [B, H] of the prompts."""
        side, start = self.side, 0
        if side.prefix is not None:
            state, start = side.prefix
            start = min(start, self.prompts.shape[1] - 1)
            last_hidden(build(side, state), side, self.prompts[:, :start], 0, self._cache)
        return self._run(self.prompts[:, start:], start, step=0)

    def step(self, token: Tensor, step: int) -> Tensor:
        """Return last hidden states [B, H] after one more token."""
        hidden = self._run(token[:, None], self.position, step=step + 1)
        self.position += 1
        return hidden

    def _run(self, ids: Tensor, start: int, step: int) -> Tensor:
        self._span = (start, start + ids.shape[1])
        if self.later is None:
            hidden = last_hidden(self.model, self.side, ids, start, self._cache)[:, -1]
        else:
            hidden = self._run_both(ids, start, step)
        if self.side.cache is not None:
            for layer in self._cache.layers:
                layer.keys, layer.values = self.side.cache(layer.keys, start), self.side.cache(layer.values, start)
        return hidden

    def _run_both(self, ids: Tensor, start: int, step: int) -> Tensor:
        """Run each row with the weights that it has reached, into one cache."""
        other = copy.deepcopy(self._cache)
        first = last_hidden(self.model, self.side, ids, start, self._cache)[:, -1]
        second = last_hidden(self.later, self.side, ids, start, other)[:, -1]
        took = step >= self.side.swap[1]
        for mine, its in zip(self._cache.layers, other.layers, strict=True):
            rows = took[:, None, None, None]
            mine.keys, mine.values = torch.where(rows, its.keys, mine.keys), torch.where(rows, its.values, mine.values)
        self._took = took
        return torch.where(took[:, None], second, first)

    def _tell_routers(self) -> None:
        if self.side.experts is None:
            return
        for layer, router in enumerate(routers(self.model)):
            self._stack.enter_context(told(router, lambda layer=layer: self._chosen(layer)))

    def _chosen(self, layer: int) -> Tensor:
        """Return the [B * n, S] experts that the current tokens must use."""
        start, end = self._span
        return self.side.experts[:, start:end, layer].flatten(0, 1).clamp(min=0)

    def experts(self) -> Tensor | None:
        """Return the [B, tokens, L, S] choices of the routers."""
        self._stack.close()
        rows = len(self.prompts)
        layers = [torch.cat([part.view(rows, -1, part.shape[-1]) for part in parts], 1) for parts in self._seen]
        return torch.stack(layers, 2) if layers else None
