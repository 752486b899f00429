"""Recompute each operator in float64 from the inputs that an execution gave it, and compare the outputs. Computations
between modules are compared at the input of the next operator."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ...tracer.store import first_line
from . import bounds, taps
from .cores import ROTARY, Cores
from .experts import is_wrong_sum, judge_choice, judge_router
from .heard import ENDS_OF_ATTENTION, ENDS_OF_MLP, FIRST_OF_MLP, Heard
from .judged import GIVES, OF_CODE, TAKES, Point
from .names import ATTENTION, core_name, kind_of, layer_of
from .taps import Call, outputs_of, with_tensors

RESIDUAL, ACTIVATION, WIRING, EMBEDDING = "residual", "activation", "wiring", "embedding"
"""Computations between operators: residual additions, gate times up projection, everything else (wiring), and changes
to the embeddings before the first layer."""
INPUT = "input"
_IN_ATTENTION = re.compile(r"att(?:n|ention)\.[^.]+$")
_QUERY_LIKE = ("q_proj", "k_proj", "v_proj", "query_key_value", "c_attn", "qkv_proj", "gate_proj", "up_proj", "gate_up_proj",
               "c_fc", "fc1", "dense_h_to_4h", "gate", "router")  # fmt: skip


class Forward:
    def __init__(self, heard: Heard, operators: Mapping[str, Any], names: Mapping[int, str]):
        self._heard, self._operators, self._names = heard, operators, names
        self._judgement = heard.judgement
        self._cores = Cores(heard, operators)

    @contextmanager
    def listening(self, mixtures: Mapping[str, Any], layers: Mapping[str, Any]) -> Iterator[None]:
        """Within the context, judge each operator, then replace its inputs and outputs with the execution's."""

        def enter(name: str, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._heard.entered[layer_of(name)] = taps.hidden_of(args, kwargs)

        with (
            taps.hooked(self._operators, self._guarded(self._take), self._guarded(self._give)),
            taps.hooked(mixtures, after=self._guarded(self._mix)),
            taps.hooked(layers, enter),
            taps.attention_around(self._core),
        ):
            yield

    def _guarded(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def called(name: str, *args: Any) -> Any:
            try:
                return hook(name, *args)
            except torch.OutOfMemoryError:
                raise
            except OF_CODE as error:
                self._judgement.unjudged.setdefault(name, f"{type(error).__name__}: {first_line(error)}")
                return None

        return called

    def _core(self, module: Any, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = core_name(self._names.get(id(module), ""))
        given = self._guarded(self._cores.judge)(name, module, original, args, kwargs)
        return original(module, *args, **kwargs) if given is None else given

    def _mix(self, name: str, _module: Any, _args: Any, _kwargs: Any, given: Any) -> Any:
        found, outputs = self._heard.taps.mixed.get(name), outputs_of(given)
        if found is None or not outputs or outputs[0].numel() != found.numel():
            return None
        if not is_wrong_sum(self._heard, name, outputs[0], found):
            return None
        return taps.with_outputs(given, [taps.like(found, outputs[0]), *outputs[1:]])

    def _give(self, name: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: Any) -> Any:
        call = self._heard.end(name)
        takes, outputs = tuple(taps.tensors_of(args, kwargs)), outputs_of(given)
        if call is None or all(each is None for each in call.gives):  # for example, if the operator runs in chunks
            if outputs and outputs[0].is_floating_point():
                self._heard.miss_module(name, module, takes, outputs[0])
            return None
        found = [taps.fitting(call.gives, slot, value) for slot, value in enumerate(outputs)]
        if name not in self._judgement.unjudged:
            if all(value.is_floating_point() for value in outputs):
                for slot, (value, own) in enumerate(zip(outputs, found, strict=True)):
                    if own is not None:
                        self._judge_output(name, module, slot, value, takes, call)
            else:
                judge_router(
                    self._heard, name, module, takes, outputs, call, lambda: outputs_of(module.forward(*args, **kwargs))
                )
        pairs = zip(outputs, found, strict=True)
        return taps.with_outputs(given, [value if own is None else taps.like(own, value) for value, own in pairs])

    def _judge_output(self, name: str, module: Any, slot: int, value: Any, takes: tuple[Any, ...], call: Call) -> None:
        given, kind, layer = call.gives[slot], kind_of(name), layer_of(name)
        if kind in (*ENDS_OF_ATTENTION, *ENDS_OF_MLP) or taps.are_experts(module):
            self._heard.branches.append(given)
        if kind in ENDS_OF_ATTENTION and ".mlp" not in name:  # custom attention code may have no function to hook
            self._judgement.attended.add(layer)
        self._cores.note_norm(name)
        bound = self._heard.bound(name, module, slot, value, takes, call, given)
        exact = taps.tokens_first(value, given)
        self._judgement.add(name, kind, layer, given, exact, bound, (self._heard.called(name), GIVES, slot))

    def _take(self, name: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = self._heard.begin(name)
        if call is None:
            return None
        found = taps.tensors_of(args, kwargs)
        if taps.are_experts(module) and len(found) > 2:
            judge_choice(self._heard, name, found, call.takes)
        own, recorded = _num_floating(call.takes), _num_floating(found)
        if name.rpartition(".")[2] != "rotary_emb" and own > recorded:
            self._judgement.unjudged[name] = f"takes {own} tensors, but {recorded} in the recorded model"
            return None
        return with_tensors(args, kwargs, [self._taken(name, slot, value, call) for slot, value in enumerate(found)])

    def _taken(self, name: str, slot: int, value: Any, call: Call) -> Any:
        taken, layer, last = taps.fitting(call.takes, slot, value), layer_of(name), name.rpartition(".")[2]
        if taken is None:
            return value
        new = taps.like(taken, value)
        if not value.is_floating_point():
            if last in ("rotary_emb", "wpe"):
                differs = taken != value.reshape(taken.shape)
                self._judgement.add_differing(f"{name}.positions", ROTARY, layer, differs, taken.numel())
            return new
        if slot and taps.are_experts(self._operators[name]):
            return new  # expert weights, which are judged with the choice
        if last == "rotary_emb":
            # The rotary module uses only the dtype of the hidden states, so they are not replaced. Their values are
            # judged at the layer's input.
            return value
        exact, point = taps.tokens_first(value, taken), (self._heard.called(name), TAKES, slot)
        if value is self._heard.entered.get(layer) and self._differs_from_layer(name, layer, taken, exact, point):
            return new
        self._between(name, layer, taken, exact, point)
        # Replace the values in place if possible, because the same tensor is later added to the residual stream.
        return value.copy_(new) if value.is_contiguous() else new

    def _differs_from_layer(self, name: str, layer: int | None, taken: Any, exact: Any, point: Point) -> bool:
        heard = self._heard
        if layer is None or layer in self._judgement.attended:
            return False
        entered = heard.taps.entered.get(layer)
        if entered is None or entered.shape != taken.shape or bool((entered == taken).all()):
            return False
        if not bool((entered.double() == exact).all()):
            bound = heard.stream_bound(exact, heard.rounding(entered.dtype))
            heard.branches = []
            if layer:
                self._judgement.add(f"layers.{layer - 1}.{RESIDUAL}", RESIDUAL, layer - 1, entered, exact, bound)
            else:
                self._judgement.add(EMBEDDING, EMBEDDING, None, entered, exact, bound)
        exact = entered.double()
        bound = bounds.of_sum(exact.abs(), heard.rounding(taken.dtype))
        self._judgement.add(f"{name}.{INPUT}", kind_of(name), layer, taken, exact, bound, point)
        return True

    def _between(self, name: str, layer: int | None, taken: Any, exact: Any, point: Point) -> None:
        if bool((taken.double() == exact).all()):
            return
        heard = self._heard
        kind, of = self._kind_between(name, layer)
        rounding = heard.rounding(taken.dtype)
        where = f"{name}.{kind}" if of is None else f"layers.{of}.{kind}"
        if kind == RESIDUAL:
            bound = heard.stream_bound(exact, rounding)
            heard.branches = []
            if of is None:
                where = kind = EMBEDDING
        elif kind == ROTARY:
            bound = bounds.of_rotary(exact, heard.first_position + len(exact), rounding)
        elif kind == ACTIVATION:
            bound = bounds.of_sum(exact, rounding, 4.0) + heard.missed_mlp(name, layer, exact, taken.dtype)
            for first in FIRST_OF_MLP if kind_of(name) not in ENDS_OF_MLP else ():
                missed = heard.missed(layer, first, exact, taken.dtype)
                # If the exact value is the output of an operator that was not observed, the error is attributed to that
                # operator, not to the activation.
                if missed is not None and bool((missed[0] == exact).all()):
                    where, kind = f"{name.rpartition('.')[0]}.{first}", first
        else:
            bound = bounds.of_sum(exact, rounding, 8.0)
            if kind == ATTENTION:
                if (core := heard.missed(layer, ATTENTION, exact, taken.dtype)) is not None:
                    bound = bound + core[1]
                if layer not in self._judgement.attended:
                    bound = bound + bounds.of_own_attention(exact, rounding)
        self._judgement.add(where, kind, of, taken, exact, bound, point)

    def _kind_between(self, name: str, layer: int | None) -> tuple[str, int | None]:
        last = name.rpartition(".")[2]
        if last in ENDS_OF_MLP or (last in ENDS_OF_ATTENTION and ".mlp" in name) or last.startswith("act"):
            return ACTIVATION, layer
        if last in ENDS_OF_ATTENTION:
            return ATTENTION, layer
        if "norm" in last and _IN_ATTENTION.search(name):  # norms that follow the rotary
            return ROTARY if self._cores.has_rotary else WIRING, layer
        if layer is None:
            return RESIDUAL, max((each for each in self._judgement.attended if each is not None), default=None)
        if layer in self._judgement.attended:
            return RESIDUAL, layer
        if "norm" in last or last.startswith("ln") or last in _QUERY_LIKE:
            return RESIDUAL, layer - 1 if layer else None
        return WIRING, layer


def _num_floating(values: Any) -> int:
    return sum(value is not None and value.is_floating_point() for value in values)
