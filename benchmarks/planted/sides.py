"""One side of a comparison: a model with its weights, numerics and faults.

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
    """One of the two scoring sides: weights, numerics and faults."""

    config: Any
    state: State
    dtype: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    attention: str = "sdpa"
    shards: int = 1
    """Number of parts of each matrix product in the layers, as in tensor parallelism; their sum is rounded."""
    input_bits: int | None = None
    """Mantissa bits of their inputs that matrix products in the layers use: 10 is TF32; None is all."""
    rows: int = 64
    """Number of sequences per forward when whole sequences are scored."""
    head: Head = PLAIN
    prefix: tuple[State, int] | None = None
    """Weights that computed the keys and values of the first prompt tokens, and how many; None: the side's own."""
    swap: tuple[State, Tensor] | None = None
    """Weights that take over, and the [B] response tokens from which they do."""
    positions: Callable[[Tensor], Tensor] | None = None
    """Function from a position to the one passed to the model."""
    window: int | None = None
    """Number of previous tokens that attention sees; None is all."""
    cache: Callable[[Tensor, int], Tensor] | None = None
    """Returns the cache content from keys or values [B, heads, length, D] after a step and its first new position."""
    experts: Tensor | None = None
    """[B, P + T - 1, L, S] experts that the routers must choose; None: their own choice."""
    router: Callable[[Tensor], Tensor] | None = None
    """Function of the hidden states whose result the routers of a mixture of experts see; None: the hidden states."""


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
    """Run the matrix products in the layers in parts, or on rounded inputs."""
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
    """Round to a mantissa of this many bits: 7 is bfloat16's, 10 is TF32's."""
    fraction, exponent = torch.frexp(values.float())
    return torch.ldexp((fraction * 2 ** (bits + 1)).round() / 2 ** (bits + 1), exponent).to(values.dtype)


def routers(model: Any) -> list[Any]:
    return [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]


@contextlib.contextmanager
def router_choices(model: Any) -> Iterator[list[list[Tensor]]]:
    """Collect the choices of each router: one list per layer, one [tokens, S] array per forward."""
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
    """Make a router choose the given experts, with its own weights for them."""

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
    """Return last hidden states [B, n, H] of n tokens that begin at an absolute position."""
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
    """Map [N, H] to float32 [N, V], in the side's numerics."""
    cap = getattr(model.config, "final_logit_softcapping", None)
    weight = model.get_output_embeddings().weight
    if side.autocast is not None and side.head.matmul is None:
        hidden, weight = hidden.to(side.autocast), weight.to(side.autocast)
    elif side.head.matmul is None:
        hidden = hidden.to(weight.dtype)
    return side.head.logits(hidden, weight, cap)
