"""One side of a comparison: a model with its weights and numerics, and what is wrong with it.

Shapes: B sequences, P prompt tokens, T response tokens, N tokens, H hidden units, V vocabulary, L layers, S experts.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from heads import PLAIN, Head
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.pytorch_utils import Conv1D

State = dict[str, Tensor]
"""Parameter name -> float32 tensor."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Side:
    """One of the two that score: weights, numerics, and what is wrong with it."""

    config: Any
    state: State
    dtype: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    attention: str = "sdpa"
    shards: int = 1
    """Parts that each matrix product inside the layers is cut in, as tensor parallelism does; their sum is rounded."""
    input_bits: int | None = None
    """Mantissa bits that matrix products inside the layers take of their inputs: 10 is TF32; None is all."""
    rows: int = 64
    """Sequences of a forward, when whole sequences are scored."""
    head: Head = PLAIN
    prefix: tuple[State, int] | None = None
    """Weights that computed the keys and values of the first so many prompt tokens; None is its own."""
    swap: tuple[State, Tensor] | None = None
    """Weights that take over, and [B] the response token from which on they do."""
    positions: Callable[[Tensor], Tensor] | None = None
    """Position -> the position that the model is told."""
    window: int | None = None
    """Tokens that attention sees back; None is all."""
    cache: Callable[[Tensor, int], Tensor] | None = None
    """(keys or values [B, heads, length, D] after a step, its first new position) -> what the cache holds then."""
    experts: Tensor | None = None
    """[B, P + T - 1, L, S] experts that the routers are told to choose; None is their own choice."""
    router: Callable[[Tensor], Tensor] | None = None
    """What the routers of a mixture of experts see of the hidden states; None is all of it."""


_skeletons: dict[tuple[int, str], Any] = {}


def build(side: Side, state: State | None = None) -> Any:
    """A transformers model with a side's weights, numerics and routers."""
    key = (id(side.config), side.attention)
    if key not in _skeletons:
        config = copy.deepcopy(side.config)
        _skeletons[key] = AutoModelForCausalLM.from_config(config, attn_implementation=side.attention).eval()
    model = copy.deepcopy(_skeletons[key])
    model.load_state_dict(state or side.state, strict=False)
    exact = {name: buffer.clone() for name, buffer in model.named_buffers() if "inv_freq" in name}
    model.to(side.dtype)
    for name, buffer in exact.items():
        model.get_submodule(name.rpartition(".")[0]).register_buffer(name.rpartition(".")[2], buffer, persistent=False)
    if side.shards > 1 or side.input_bits is not None:
        _change_products(model, side)
    if side.router is not None:
        for router in routers(model):
            router.register_forward_pre_hook(lambda _, given: (side.router(given[0]), *given[1:]))
    return model


def _change_products(model: Any, side: Side) -> None:
    """Let the matrix products inside the layers run in parts, or on rounded inputs."""
    for name, module in model.base_model.named_modules():
        if isinstance(module, (torch.nn.Linear, Conv1D)) and "router" not in name:
            module.forward = partial(_product, module, side.shards, side.input_bits)


def _product(module: Any, shards: int, bits: int | None, hidden: Tensor) -> Tensor:
    weight = module.weight if isinstance(module, Conv1D) else module.weight.T
    if bits is not None:
        hidden, weight = fewer_bits(hidden, bits), fewer_bits(weight, bits)
    parts = zip(hidden.chunk(shards, -1), weight.chunk(shards, 0), strict=True)
    out = sum(part @ rows for part, rows in parts)
    return out if module.bias is None else out + module.bias


def fewer_bits(values: Tensor, bits: int) -> Tensor:
    """Round to a mantissa of so many bits: 7 is bfloat16's, 10 is TF32's."""
    fraction, exponent = torch.frexp(values.float())
    return torch.ldexp((fraction * 2 ** (bits + 1)).round() / 2 ** (bits + 1), exponent).to(values.dtype)


def routers(model: Any) -> list[Any]:
    return [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]


@contextlib.contextmanager
def router_choices(model: Any) -> Iterator[list[list[Tensor]]]:
    """Collect what each router chooses: one list a layer, one [tokens, S] a forward."""
    found = routers(model)
    seen: list[list[Tensor]] = [[] for _ in found]
    hooks = [
        router.register_forward_hook(lambda _, __, out, kept=kept: kept.append(out[2]))
        for router, kept in zip(found, seen, strict=True)
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def told(router: Any, chosen: Callable[[], Tensor]) -> Iterator[None]:
    """Let a router choose what it is told, with its own weights for those."""

    def choose(_: Any, __: Any, out: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        logits, scores, _own = out
        experts = chosen()
        weights = logits.float().softmax(-1).gather(-1, experts)
        if getattr(router, "norm_topk_prob", True):
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights.to(scores.dtype), experts

    hook = router.register_forward_hook(choose)
    try:
        yield
    finally:
        hook.remove()


def last_hidden(model: Any, side: Side, ids: Tensor, start: int, cache: DynamicCache | None) -> Tensor:
    """Last hidden states [B, n, H] of n tokens that begin at an absolute position."""
    positions = torch.arange(start, start + ids.shape[1])
    told = positions if side.positions is None else side.positions(positions)
    options: dict[str, Any] = {}
    if side.window is not None:
        options["attention_mask"] = _window_mask(positions, start + ids.shape[1], side.window, len(ids), side.dtype)
    precision = contextlib.nullcontext() if side.autocast is None else torch.autocast("cpu", dtype=side.autocast)
    with precision:
        return model.base_model(
            input_ids=ids,
            position_ids=told.expand(len(ids), -1),
            past_key_values=cache,
            use_cache=cache is not None,
            **options,
        ).last_hidden_state


def _window_mask(positions: Tensor, length: int, window: int, rows: int, dtype: torch.dtype) -> Any:
    back = positions[:, None] - torch.arange(length)[None]
    seen = (back >= 0) & (back < window)
    mask = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
    return mask.expand(rows, 1, -1, -1)


def output_logits(model: Any, side: Side, hidden: Tensor) -> Tensor:
    """[N, H] -> [N, V] float32, in the side's numerics."""
    cap = getattr(model.config, "final_logit_softcapping", None)
    weight = model.get_output_embeddings().weight
    if side.autocast is not None and side.head.matmul is None:
        hidden, weight = hidden.to(side.autocast), weight.to(side.autocast)
    elif side.head.matmul is None:
        hidden = hidden.to(weight.dtype)
    return side.head.logits(hidden, weight, cap)
