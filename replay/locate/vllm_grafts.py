"""Operators of vLLM computed by transformers' code, and of transformers by vLLM's, on the first one's own inputs.

Shapes: W tokens of a forward, N heads, G key-value heads, D head width.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from ..backends.vllm_mixture import Select, in_order, is_mixture, selecting
from ..batching import PaddedBatch
from ..recorded import RecordedRow
from .cores import ROTARY
from .exact_execution import ExactExecution
from .exact_grafts import ExactGiver, ExactTaker
from .execution import Execution
from .grafts import Graft, as_given, cast
from .names import core_name
from .taps import attention_layers, operators
from .vllm_execution import AnyExecution, Span, VllmExecution, names

_ROTATES = "apply_rotary_pos_emb"
"""transformers' function that turns queries and keys, in the module of each model."""
_ACTIVATION = "act_fn"


class VllmTaker:
    """Puts operators of transformers into vLLM's model while it runs."""

    def __init__(self, taker: VllmExecution, giver: Execution):
        self.taker = taker
        self._as_itself = ExactGiver(giver, giver) if isinstance(giver, ExactExecution) else Graft(giver, giver)
        self._giver = giver
        self._theirs = self._as_itself.theirs
        self._modules = dict(giver.model.named_modules())
        self._names = names(taker.model)
        self._spans: list[Span] = []
        self._rows: dict[str, RecordedRow] = {}
        self._masks: dict[str, dict[str, Any]] = {}

    def names(self, rows: Sequence[RecordedRow], of: list[RecordedRow]) -> list[str]:
        """The operators that can be put in; attention where vLLM has whole sequences in a forward."""
        found = [each for parts in self._names.values() for each in parts if each in self._theirs]
        layers = attention_layers(self._giver.model)
        found += [name for name in self._theirs if name.endswith(f".{_ACTIVATION}")]
        if not isinstance(self._giver, ExactExecution) and self._rotation(layers[0]) is not None:
            found += [f"{layer}.{ROTARY}" for layer in layers]
        if self.taker.takes_whole_rows:
            found += [core_name(layer) for layer in layers]
        return [name for name in found if not name.endswith("rotary_emb")]

    def score(
        self, names: Collection[str], rows: Sequence[RecordedRow], of: list[RecordedRow]
    ) -> dict[str, np.ndarray]:
        """Sequence -> [T] float64 log-probabilities of vLLM's, of some rows `of` a step, with these operators transformers'."""
        self._rows = {row.seq_id: row for row in rows}
        with self.taker.following(rows, self._begin), self._put(names):
            return self.taker.score(rows, of)

    def _begin(self, spans: list[Span], positions_W: Any) -> None:
        self._spans = spans

    @contextmanager
    def _put(self, names: Collection[str]) -> Iterator[None]:
        with ExitStack() as stack:
            for layer in attention_layers(self._giver.model):
                if f"{layer}.{ROTARY}" in names:
                    stack.enter_context(self._rotated(layer))
            for name, module in self.taker.model.named_modules():
                layer, _, last = name.rpartition(".")
                hook: Callable[..., Any] | None = None
                if is_mixture(module):
                    stack.enter_context(self._mixture(name, module, names))
                elif name.endswith(f".{_ACTIVATION}") and name in names:
                    hook = self._activation(name)
                elif core_name(layer) in names and last == "attn":
                    hook = self._attention(layer, module)
                elif any(each in names for each in self._names.get(name, ())):
                    hook = self._operator(name, module, names)
                if hook is not None:
                    stack.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
            yield

    def _computed(self, name: str, value: Any, given: Any) -> Any:
        """What transformers' operator makes of what vLLM's took, in the dtype of what that gave."""
        return as_given(self._called(name, value), given).reshape(given.shape)

    def _called(self, name: str, *values: Any) -> Any:
        theirs = self._theirs[name]
        dtype = next(theirs.parameters(), self._as_itself.first).dtype
        with self._as_itself.as_giver():
            return theirs(*(cast(value, dtype) for value in values))

    def _operator(self, name: str, module: Any, names: Collection[str]) -> Callable[..., Any]:
        theirs = self._names[name]

        def graft(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: Any) -> Any:
            outputs = list(given) if isinstance(given, tuple) else [given]
            taken = args[0] if args else next(iter(kwargs.values()))
            if len(args) + len(kwargs) > 1 and len(outputs) > 1 and outputs[1] is not None:
                taken = outputs[1]
            if len(theirs) == 1:
                outputs[0] = self._computed(name, taken, outputs[0])
            else:
                import torch

                parts = outputs[0].split(module.output_partition_sizes, dim=-1)
                outputs[0] = torch.cat(
                    [self._computed(each, taken, part) if each in names else part for each, part in zip(theirs, parts, strict=True)],
                    dim=-1,
                )  # fmt: skip
            return tuple(outputs) if isinstance(given, tuple) else outputs[0]

        return graft

    @contextmanager
    def _mixture(self, name: str, module: Any, names: Collection[str]) -> Iterator[None]:
        gate, experts = self._names[name]
        chosen: list[tuple[Any, Any]] = []

        def choose(select: Select, hidden: Any, logits: Any) -> tuple[Any, Any]:
            weights, ids = select(hidden, logits)
            if gate in names:
                _, new, new_ids = self._called(gate, hidden)
                weights, ids = new.to(weights.dtype).contiguous(), new_ids.to(ids.dtype).contiguous()
            chosen.append((weights, ids))
            return weights, ids

        def graft(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: Any) -> Any:
            weights, ids = chosen.pop()
            if experts not in names:
                return None
            new = self._called(experts, args[0] if args else kwargs["hidden_states"], ids.long(), weights)
            return as_given(new, given).reshape(given.shape)

        handle = module.register_forward_hook(graft, with_kwargs=True)
        try:
            with selecting(module, choose):
                yield
        finally:
            handle.remove()

    def _activation(self, name: str) -> Callable[..., Any]:
        def graft(_module: Any, args: tuple[Any, ...], _kwargs: dict[str, Any], given: Any) -> Any:
            gate, up = args[0].chunk(2, dim=-1)
            dtype = self._as_itself.first.dtype
            with self._as_itself.as_giver():
                new = self._theirs[name](cast(gate, dtype)) * cast(up, dtype)
            return as_given(new, given)

        return graft

    def _rotation(self, layer: str) -> Callable[..., Any] | None:
        module = self._modules[layer]
        return getattr(sys.modules[type(module).__module__], _ROTATES, None)

    @contextmanager
    def _rotated(self, layer: str) -> Iterator[None]:
        """Within it vLLM's rotary, one module for all layers, gives in this layer what transformers' gives."""
        attention = dict(self.taker.model.named_modules())[layer]
        rotate, tables = self._rotation(layer), self._modules["model.rotary_emb"]
        assert rotate is not None
        width = self._modules[layer].head_dim

        def rotary(positions_W: Any, query: Any, key: Any) -> tuple[Any, ...]:
            dtype = self._as_itself.first.dtype
            heads = [cast(state, dtype).reshape(1, len(state), -1, width).transpose(1, 2) for state in (query, key)]
            with self._as_itself.as_giver():
                cos, sin = tables(heads[0], positions_W[None])
                turned = rotate(*heads, cos, sin)
            return tuple(
                as_given(new.transpose(1, 2)[0], state).reshape(state.shape)
                for new, state in zip(turned, (query, key), strict=True)
            )

        before = attention._modules.pop("rotary_emb")
        attention.rotary_emb = rotary
        try:
            yield
        finally:
            del attention.rotary_emb
            attention._modules["rotary_emb"] = before

    def _attention(self, layer: str, module: Any) -> Callable[..., Any]:
        name = core_name(layer)

        def graft(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: Any) -> Any:
            states = [*args, *(kwargs[word] for word in ("query", "key", "value") if word in kwargs)][:3]
            dtype = self._as_itself.first.dtype
            new = given.clone()
            for seq_id, where, _ in self._spans:
                function, theirs, mask, words = self._masks_of(seq_id)[name]
                heads = [
                    cast(state[where], dtype).reshape(1, where.stop - where.start, -1, module.head_size).transpose(1, 2)
                    for state in states
                ]
                with self._as_itself.as_giver():
                    made = function(theirs, *heads, mask, **words)[0]
                new[where] = as_given(made, given).reshape(new[where].shape)
            return new

        return graft

    def _masks_of(self, seq_id: str) -> dict[str, Any]:
        """transformers' attention functions and masks for a sequence alone."""
        if seq_id not in self._masks:
            row = self._rows[seq_id]
            ids = np.concatenate([row.prompt_ids, row.response_ids]).astype(np.int64)[None]
            batch = PaddedBatch(
                rows=(row,), ids_BW=ids, mask_BW=np.ones_like(ids), first_B=np.array([len(row.prompt_ids)])
            )
            self._masks[seq_id] = self._as_itself.masks_of(batch)
        return self._masks[seq_id]


class VllmGiver(Graft):
    """Puts vLLM's projections, norms and embedding into transformers' model while it runs; vLLM's other operators need its cache."""

    def __init__(self, taker: Execution, giver: VllmExecution):
        self.taker = taker
        self._ours = operators(taker.model)
        modules = dict(giver.model.named_modules())
        self.theirs: dict[str, Any] = {}
        for name, parts in names(giver.model).items():
            if is_mixture(modules[name]):
                gate, experts = parts
                self.theirs |= {gate: _Gate(modules[gate], modules[name]), experts: _Experts(modules[name])}
            elif name.rpartition(".")[2] not in ("attn", "rotary_emb"):
                self.theirs |= {each: _Part(modules[name], place, len(parts)) for place, each in enumerate(parts)}

    def names(self, rows: Sequence[RecordedRow], of: list[RecordedRow]) -> list[str]:
        return [name for name in self._ours if name in self.theirs]

    @contextmanager
    def put(self, names: Collection[str], batch: Any) -> Iterator[None]:
        with ExitStack() as stack:
            for name in names:
                stack.callback(self._ours[name].register_forward_hook(self.theirs[name].graft).remove)
            yield


class _Part:
    """A module of vLLM's, or a part of what it computes at once."""

    def __init__(self, module: Any, place: int, number: int):
        self._module, self._place, self._number = module, place, number

    def graft(self, _module: Any, args: tuple[Any, ...], given: Any) -> Any:
        """A forward hook of transformers' module."""
        import torch

        taken = args[0]
        dtype = next(self._module.parameters()).dtype
        with torch._C.DisableTorchFunction(), torch.inference_mode():
            flat = cast(taken, dtype)
            flat = flat.flatten(0, 1) if flat.dim() > 1 else flat
            new = self._module(flat)
            new = new[0] if isinstance(new, tuple) else new
            if self._number > 1:
                new = new.split(self._module.output_partition_sizes, dim=-1)[self._place]
            new = new.clone()
        return as_given(new, given).reshape(given.shape)


class _Gate:
    """The router of a mixture of vLLM's."""

    def __init__(self, gate: Any, module: Any):
        self._gate, self._module = gate, module

    def graft(self, _module: Any, args: tuple[Any, ...], given: Any) -> Any:
        """A forward hook of transformers' router, which gives logits, weights and experts."""
        import torch

        with torch._C.DisableTorchFunction(), torch.inference_mode():
            hidden = cast(args[0], self._gate.weight.dtype).reshape(-1, args[0].shape[-1])
            logits = self._gate(hidden)
            logits = logits[0] if isinstance(logits, tuple) else logits
            new = (logits.clone(), *in_order(*self._module.router.select_experts(hidden, logits)))
        return as_given(new, given)


class _Experts:
    """The experts of a mixture of vLLM's."""

    def __init__(self, module: Any):
        self._module = module

    def graft(self, _module: Any, args: tuple[Any, ...], given: Any) -> Any:
        """A forward hook of transformers' experts, which take hidden states, experts and weights."""
        import torch

        experts = self._module.routed_experts
        with torch._C.DisableTorchFunction(), torch.inference_mode():
            hidden = cast(args[0], experts.w13_weight.dtype).reshape(-1, args[0].shape[-1]).contiguous()
            new = experts.forward_modular(
                x=hidden, topk_weights=args[2].float().contiguous(), topk_ids=args[1].int().contiguous()
            ).clone()
        return as_given(new, given).reshape(given.shape)


AnyGraft = Graft | VllmTaker | ExactTaker


def can_patch(taker: AnyExecution, giver: AnyExecution) -> bool:
    """Whether operators of a giver can be put into a taker: vLLM's go into transformers' model alone."""
    return not isinstance(giver, VllmExecution) or type(taker) is Execution


def graft_of(taker: AnyExecution, giver: AnyExecution) -> AnyGraft:
    """What puts operators of a giver into a taker, where that can be."""
    if isinstance(giver, VllmExecution):
        assert isinstance(taker, Execution)
        return VllmGiver(taker, giver)
    if isinstance(taker, VllmExecution):
        return VllmTaker(taker, giver)
    if isinstance(taker, ExactExecution):
        return ExactTaker(taker, giver)
    return ExactGiver(taker, giver) if isinstance(giver, ExactExecution) else Graft(taker, giver)
