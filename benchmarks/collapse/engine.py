"""The rollout engine: samples with a KV cache from its own weights, with the faults that are switched on.

Shapes: B rows, P prompt tokens, T response tokens, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from switches import Switches
from tasks import EOS, PAD
from torch import Tensor
from transformers import DynamicCache

State = dict[str, Tensor]
_DTYPES = {None: torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """What the engine returned."""

    ids: Tensor
    """[B, T]; PAD after the end."""
    mask: Tensor
    """[B, T] bool: tokens of the response, including the end token."""
    logprobs: Tensor
    """[B, T] nats, as returned by the engine."""
    version: int
    """Optimizer updates that the engine's weights had seen."""


class Engine:
    """Stores a copy of the model, and the versions not loaded yet."""

    def __init__(self, model: Any, switches: Switches, seed: int):
        """`model` is a copy of the trainer's model that this engine may change."""
        self.model = model
        self.switches = switches
        self._waiting: deque[tuple[int, State]] = deque()
        self._version = 0
        chance = torch.Generator().manual_seed(seed)
        self._kept_back = {
            name for name, value in model.named_parameters()
            if value.ndim == 2 and float(torch.rand((), generator=chance)) < switches.unsynchronised
        }  # fmt: skip

    def synchronise(self, trained: Any, version: int, *, is_wrong: bool) -> None:
        """Load the trainer's weights, as far as the switches allow; `is_wrong` is True if they are on."""
        switches = self.switches if is_wrong else self.switches.before
        self._waiting.append((version, {name: value.detach().clone() for name, value in trained.state_dict().items()}))
        while len(self._waiting) > switches.stale + 1:
            self._waiting.popleft()
        self._version, state = self._waiting[0]
        kept_back = self._kept_back if is_wrong else set()
        with torch.no_grad():
            for name, value in self.model.named_parameters():
                if name in kept_back and version > 0:
                    continue
                new = state[name]
                if switches.weight_bits and new.ndim == 2:
                    new = rounded(new, switches.weight_bits)
                value.copy_(new)

    @torch.no_grad()
    def generate(self, prompt_BP: Tensor, max_tokens: int, noise_TBV: Tensor, *, is_wrong: bool) -> Rollout:
        """Sample responses; token t of row b is the argmax of logits + noise[t, b], so twins share their randomness."""
        switches = self.switches if is_wrong else self.switches.before
        model = self.model.to(_DTYPES[switches.engine_dtype])
        steps = _exact_logits(model, prompt_BP, max_tokens) if switches.exact else _cached_logits(model, switches.cache)
        ids, logprobs = [], []
        token_B, running_B, alive = prompt_BP, torch.ones(len(prompt_BP), dtype=torch.bool), []
        for noise_BV in noise_TBV[:max_tokens]:
            logits_BV = truncated(steps(token_B).float() / switches.temperature, switches.top_p)
            logprobs_BV = logits_BV.log_softmax(-1)
            chosen_B = torch.where(running_B, (logprobs_BV + noise_BV).argmax(-1), PAD)
            ids.append(chosen_B)
            logprobs.append(logprobs_BV.gather(-1, chosen_B[:, None])[:, 0])
            alive.append(running_B)
            running_B = running_B & (chosen_B != EOS)
            token_B = chosen_B[:, None]
            if not running_B.any() and not switches.exact:  # the exact engine is as wide as the trainer
                break
        self.model.float()
        return Rollout(
            ids=torch.stack(ids, 1),
            mask=torch.stack(alive, 1),
            logprobs=torch.stack(logprobs, 1),
            version=self._version,
        )


def rounded(weight_OI: Tensor, bits: int) -> Tensor:
    """Round a weight to a symmetric integer grid with one scale."""
    scale = weight_OI.abs().amax() / (2 ** (bits - 1) - 1)
    return (weight_OI / scale).round() * scale


def truncated(logits_BV: Tensor, top_p: float) -> Tensor:
    """Return the logits, with -inf outside the smallest set of tokens with `top_p` of the mass."""
    if top_p >= 1.0:
        return logits_BV
    sorted_BV, order_BV = logits_BV.softmax(-1).sort(-1, descending=True)
    outside_BV = sorted_BV.cumsum(-1) - sorted_BV >= top_p
    return logits_BV.masked_fill(torch.zeros_like(outside_BV).scatter(-1, order_BV, outside_BV), -torch.inf)


def _cached_logits(model: Any, cache_dtype: str | None) -> Any:
    """Return a function from new tokens [B, N] to the next token's logits [B, V], with a KV cache."""
    cache = _Rounding(cache_dtype) if cache_dtype else DynamicCache()

    def step(new_BN: Tensor) -> Tensor:
        return model(input_ids=new_BN, past_key_values=cache, use_cache=True).logits[:, -1]

    return step


def _exact_logits(model: Any, prompt_BP: Tensor, max_tokens: int) -> Any:
    """Return the same with a forward as wide as the trainer's: masked positions add exact zeros, so bits match."""
    ids_BL = torch.nn.functional.pad(prompt_BP, (0, max_tokens), value=PAD)
    filled = 0

    def step(new_BN: Tensor) -> Tensor:
        nonlocal filled
        ids_BL[:, filled : filled + new_BN.shape[1]] = new_BN
        filled += new_BN.shape[1]
        return model(input_ids=ids_BL[:, :-1], use_cache=False).logits[:, filled - 1]

    return step


_FLOATS = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
_LARGEST = {"int4": 7, "int2": 1}
"""Largest magnitude of each integer grid."""


class _Rounding(DynamicCache):  # type: ignore[misc]
    """A KV cache with fewer bits than the model computes in."""

    def __init__(self, name: str):
        super().__init__()
        self._name = name

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().update(self._rounded(keys), self._rounded(values), *args, **kwargs)

    def _rounded(self, states: Tensor) -> Tensor:
        if self._name in _FLOATS:
            return states.to(_FLOATS[self._name]).to(states.dtype)
        scale = (states.abs().amax(-1, keepdim=True) / _LARGEST[self._name]).clamp(min=1e-12)
        return (states / scale).round() * scale
