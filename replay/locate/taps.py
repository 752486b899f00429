"""Record the inputs and outputs of each operator for selected rows of a forward pass.

Shapes: B rows in a forward pass, W padded row length, T tokens per row (prompt and response), N heads, D head width.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from typing import Any

import torch

from ...tracer.hooks.patches import replaced
from ..batching import ForwardBatch
from .names import CallNames, core_name, layer_modules, layer_of

_SKIPPED = ("Dropout", "Identity")
_RECENT = 16
"""Number of recent tensors to compare a new one with, so that no tensor is copied twice."""


@dataclass(frozen=True, slots=True)
class Call:
    """Inputs and outputs of one operator call for one row. Tensors are [T, ...], or None if they have no token axis."""

    takes: tuple[Any, ...]
    gives: tuple[Any, ...]
    adds: bool = False
    """True if the operator adds two inputs first. `takes` has their rounded sum; the operator may use the exact one."""
    is_other_code: bool = False
    """True if the operator runs code other than the recorded model's. That code may round after each step."""


@dataclass(slots=True)
class RowTaps:
    calls: dict[str, Call] = field(default_factory=dict)
    """Operator calls by name, in execution order."""
    entered: dict[int, Any] = field(default_factory=dict)
    """Layer inputs [T, H] by layer index. Absent if the layer is not called as a module."""
    mixed: dict[str, Any] = field(default_factory=dict)

    @property
    def first_position(self) -> int:
        """Position id of the row's first token. Above 0 if the execution counts left padding as positions."""
        for name, call in self.calls.items():
            if name.rpartition(".")[2] in ("rotary_emb", "wpe"):
                for value in call.takes:
                    if value is not None and not value.is_floating_point():
                        return int(value.flatten()[0])
        return 0


def places(batch: ForwardBatch, chosen: Iterable[int], device: Any) -> dict[int, Any]:
    """For each chosen row, return the indices [T] of its tokens in the flattened batch."""
    return {index: torch.from_numpy(batch.places_B[index]).to(device) for index in chosen}


def operators(model: Any, also: Collection[str] = ()) -> dict[str, Any]:
    """Return the modules without submodules, plus those named in `also`. The experts of a layer count as one
    operator, and so does a projection with its adapters."""
    found: dict[str, Any] = {}
    whole: tuple[str, ...] = ()
    for name, module in model.named_modules():
        is_named = name in also
        if not name or name.startswith(whole or (" ",)) or (type(module).__name__ in _SKIPPED and not is_named):
            continue
        if is_named or are_experts(module) or _is_router(module) or is_adapted(module):
            found[name] = module
            whole = (*whole, f"{name}.")
        elif not any(True for _ in module.children()):
            found[name] = module
    return found


def are_experts(module: Any) -> bool:
    own = dict(module.named_parameters(recurse=False))
    return {"gate_up_proj", "down_proj"} <= set(own) and own["down_proj"].dim() == 3


def _is_router(module: Any) -> bool:
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    return weight is not None and weight.dim() == 2 and type(module).__name__.endswith("Router")


def mixtures(model: Any) -> dict[str, Any]:
    """Return the mixture-of-experts modules. Each adds up the outputs of its experts, including the shared expert."""
    return {name: module for name, module in model.named_modules() if "experts" in dict(module.named_children())}


def is_adapted(module: Any) -> bool:
    return hasattr(module, "base_layer") and hasattr(module, "lora_A")


def of_tokens(value: Any, shape: tuple[int, int], places_T: Any, *, heads_first: bool = False) -> Any:
    """Return a row's slice of [B, W, ...], [B * W, ...], [1, W, ...] or [B, N, W, D]. None without a token axis."""
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return None
    if heads_first:
        value = value.transpose(1, 2)
    B, W = shape
    if value.dim() >= 2 and tuple(value.shape[:2]) == (B, W):
        return value.detach().flatten(0, 1)[places_T]
    if value.shape[0] == B * W:
        return value.detach()[places_T]
    if value.dim() >= 2 and tuple(value.shape[:2]) == (1, W):
        return value.detach()[0][places_T % W]

    # A per-head query norm returns [B, N, W, D], so move the head axis after the token axis.
    if not heads_first and value.dim() == 4 and (value.shape[0], value.shape[2]) == (B, W):
        return of_tokens(value, shape, places_T, heads_first=True)
    return None


def is_heads_first(template: Any, value_T: Any) -> bool:
    """Return True if `template` is [1, N, T, D] and `value_T` is [T, N, D]."""
    return (
        template.dim() == 4 and value_T.dim() == 3 and template.shape[0] == 1
        and tuple(template.shape[1:3]) == (value_T.shape[1], value_T.shape[0]) != tuple(value_T.shape[:2])
    )  # fmt: skip


def tokens_first(template: Any, value_T: Any) -> Any:
    """Reshape a single-row tensor to the shape of `value_T`, [T, ...]."""
    if is_heads_first(template, value_T):
        template = template.transpose(1, 2)
    return template.reshape(value_T.shape)


def like(value_T: Any, template: Any, *, heads_first: bool = False) -> Any:
    """Reshape and cast a row's tensor [T, ...] to match `template` (from a single-row forward pass)."""
    if heads_first or is_heads_first(template, value_T):
        value_T = value_T.transpose(0, 1)
    shaped = value_T.reshape(template.shape)
    return shaped.to(template.dtype) if template.is_floating_point() else shaped


def fitting(found: Sequence[Any], slot: int, value: Any) -> Any:
    """Return the recorded tensor that replaces `value`, or None if it is missing or has a different size."""
    own = found[slot] if slot < len(found) else None
    return None if own is None or own.numel() != value.numel() else own


def tensors_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return all tensors in a call's arguments, including nested ones. Keyword arguments come last, sorted by name."""
    return [*outputs_of(args), *outputs_of([kwargs[name] for name in sorted(kwargs)])]


def outputs_of(value: Any) -> list[Any]:
    """Return all tensors in a result, including those nested in tuples, lists, dicts or dataclasses."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for part in _parts(value) for tensor in outputs_of(part)]


def with_tensors(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], new: list[Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with their tensors replaced by `new`, in the order of `tensors_of`."""
    number = len(outputs_of(args))
    names = sorted(kwargs)
    named = dict(zip(names, with_outputs([kwargs[name] for name in names], new[number:]), strict=True))
    return with_outputs(args, new[:number]), {name: named[name] for name in kwargs}


def with_outputs(value: Any, new: Iterable[Any]) -> Any:
    """Return the value with its tensors replaced by `new`, in the order of `outputs_of`."""
    rest = iter(new)
    if isinstance(value, torch.Tensor):
        return next(rest)
    if not (parts := _parts(value)):
        return value
    new = [with_outputs(part, rest) for part in parts]
    if isinstance(value, slice):
        return slice(*new)
    if isinstance(value, dict):  # in transformers' ModelOutput, items are also attributes
        changed = copy(value)
        for name, part in zip(list(value), new, strict=True):
            changed[name] = part
        return changed
    if isinstance(value, tuple | list):
        return value._make(new) if hasattr(value, "_make") else type(value)(new)
    changed = copy(value)
    for each, part in zip(fields(value), new, strict=True):
        object.__setattr__(changed, each.name, part)  # also works for frozen dataclasses
    return changed


def _parts(value: Any) -> list[Any]:
    if isinstance(value, tuple | list):
        return list(value)
    if isinstance(value, slice):
        return [value.start, value.stop, value.step]
    if isinstance(value, dict):
        return list(value.values())
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, each.name) for each in fields(value)]
    return []


Around = Callable[[Any, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Replacement for an attention function, called as (module, original, args, kwargs)."""


@contextmanager
def attention_around(around: Around) -> Iterator[None]:
    """Within the block, call transformers' attention functions through `around`."""
    from transformers.modeling_utils import AttentionInterface

    original = AttentionInterface.get_interface

    def get_interface(self: Any, implementation: str, default: Any) -> Any:
        function = original(self, implementation, default)

        def called(module: Any, *args: Any, **kwargs: Any) -> Any:
            return around(module, function, args, kwargs)

        return called

    with replaced(AttentionInterface, "get_interface", get_interface):
        yield


@contextmanager
def hooked(
    modules: Mapping[str, Any], before: Callable[..., Any] | None = None, after: Callable[..., Any] | None = None
) -> Iterator[None]:
    """Hook each module with `before(name, module, args, kwargs)` and `after(name, module, args, kwargs, given)`. As in
    torch, a returned value replaces the arguments or the result."""
    with ExitStack() as stack:
        for name, module in modules.items():
            if before is not None:
                stack.callback(module.register_forward_pre_hook(partial(before, name), with_kwargs=True).remove)
            if after is not None:
                stack.callback(module.register_forward_hook(partial(after, name), with_kwargs=True).remove)
        yield


def hidden_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return args[0] if args else kwargs.get("hidden_states")


class Taps:
    def __init__(self, model: Any, wanted: Callable[[str], bool], recorded: Mapping[str, Any]):
        self._device = next(model.parameters()).device
        every = operators(model, recorded)
        self._operators = {name: module for name, module in every.items() if wanted(name)}
        self._other = {
            name
            for name, module in every.items()
            if (own := recorded.get(name)) is not None
            and ("forward" in vars(module) or type(module).forward is not type(own).forward)
        }
        self._cores = {
            id(module): core_name(name) for name, module in model.named_modules() if wanted(core_name(name))
        }  # fmt: skip
        self._layers = {name: module for name, module in layer_modules(model).items() if wanted(name)}
        self._mixtures = {name: module for name, module in mixtures(model).items() if wanted(name)}

    @contextmanager
    def heard(self, batch: ForwardBatch, chosen: Mapping[int, RowTaps]) -> Iterator[None]:
        """Observe one forward pass. `chosen` maps row indices to the taps to fill."""
        self._chosen, self._shape = chosen, batch.tokens_BW.shape
        self._places = places(batch, chosen, self._device)
        self._calls = CallNames()
        self._recent: deque[tuple[Any, int, dict[int, Any]]] = deque(maxlen=_RECENT)
        self._taken: dict[str, dict[int, tuple[Any, ...]]] = {}
        """Copied inputs of running operators, by operator and row. Operators may change them in place."""
        with (
            hooked(self._layers, self._enters),
            hooked(self._mixtures, after=self._mixed),
            hooked(self._operators, self._takes, lambda name, *call: self._keep(name, outputs_of(call[-1]))),
            attention_around(self._core),
        ):
            yield

    def _kept(self, value: Any, index: int) -> Any:
        """Return a row's slice of a tensor. A tensor that several operators take or return is copied only once."""
        if value.is_inference():
            return of_tokens(value, self._shape, self._places[index])
        for tensor, version, parts in self._recent:
            if tensor is value and version == value._version and index in parts:
                return parts[index]
        part = of_tokens(value, self._shape, self._places[index])
        self._recent.append((value, value._version, {index: part}))
        return part

    def _keep(self, name: str, gives: Sequence[Any]) -> None:
        takes, call = self._taken.pop(name), self._calls.next(name)
        for index, taps in self._chosen.items():
            given = tuple(self._kept(value, index) for value in gives)
            taps.calls[call] = Call(takes[index], given, is_other_code=name in self._other)

    def _enters(self, name: str, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        layer, hidden = layer_of(name), hidden_of(args, kwargs)
        if isinstance(hidden, torch.Tensor) and layer is not None:
            for index, taps in self._chosen.items():
                taps.entered[layer] = self._kept(hidden, index)

    def _mixed(self, name: str, _module: Any, _args: Any, _kwargs: Any, given: Any) -> None:
        for value in outputs_of(given)[:1]:
            for index, taps in self._chosen.items():
                taps.mixed[name] = self._kept(value, index)

    def _takes(self, name: str, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        values = tensors_of(args, kwargs)
        self._taken[name] = {index: tuple(self._kept(value, index) for value in values) for index in self._chosen}

    def _core(self, module: Any, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = self._cores.get(id(module))
        if name is None:
            return original(module, *args, **kwargs)
        self._taken[name] = {
            index: tuple(of_tokens(value, self._shape, self._places[index], heads_first=True) for value in args[:3])
            for index in self._chosen
        }
        given = original(module, *args, **kwargs)
        self._keep(name, [given[0]])
        return given


def attention_layers(model: Any) -> list[str]:
    words = ("q_proj", "query_key_value", "c_attn", "qkv_proj")
    return [
        name
        for name, module in model.named_modules()
        if name and any(hasattr(module, word) for word in words) and not name.endswith("mlp")
    ]
