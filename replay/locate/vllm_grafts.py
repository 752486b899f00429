"""Computes operators of vLLM with transformers' code, and vice versa, on the replaced operator's own inputs.

Shapes: W tokens in a forward pass, N heads, G key-value heads, D head width.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from ..backends.vllm_mixture import Select, in_order, is_mixture
from ..batching import PaddedBatch
from ..recorded import RecordedRow
from .cores import ROTARY
from .exact_execution import ExactExecution
from .exact_grafts import ExactGiver, ExactTaker
from .execution import Execution
from .grafts import Graft, as_given, cast
from .names import core_name
from .taps import attention_layers, hooked, operators
from .vllm_execution import AnyExecution, Span, VllmExecution, mixture_around, names, states_of

_ROTATES = "apply_rotary_pos_emb"
"""Name of the function that rotates queries and keys in the transformers module of each model."""
_ACTIVATION = "act_fn"


class VllmTaker:
    """Replacement of operators in vLLM's running model by those of transformers, or of the exact engine."""

    def __init__(self, taker: VllmExecution, giver: Execution):
        self.taker = taker
        self._by = ExactGiver(giver, giver) if isinstance(giver, ExactExecution) else Graft(giver, giver)
        self._is_exact = isinstance(giver, ExactExecution)
        self._modules = dict(giver.model.named_modules())
        self._layers = attention_layers(giver.model)
        self._names = names(taker.model)
        self._spans: list[Span] = []
        self._rows: dict[str, RecordedRow] = {}
        self._masks: dict[str, dict[str, Any]] = {}

    def names(self, rows: Sequence[RecordedRow], of: list[RecordedRow]) -> list[str]:
        """Return the operators that can be replaced; attention only if vLLM runs whole sequences in one forward
        pass."""
        found = [each for parts in self._names.values() for each in parts if each in self._by.theirs]
        found += [name for name in self._by.theirs if name.endswith(f".{_ACTIVATION}")]
        if not self._is_exact and self._rotation(self._layers[0]) is not None:
            found += [f"{layer}.{ROTARY}" for layer in self._layers]
        if self.taker.takes_whole_rows:
            found += [core_name(layer) for layer in self._layers]
        return [name for name in found if not name.endswith("rotary_emb")]

    def score(
        self, names: Collection[str], rows: Sequence[RecordedRow], of: list[RecordedRow]
    ) -> dict[str, np.ndarray]:
        """Return sequence -> vLLM's [T] float64 log-probabilities of `rows`, in batches of `of`, with the giver's operators."""
        self._rows = {row.seq_id: row for row in rows}
        with self.taker.following(rows, self._begin), self._put(names):
            return self.taker.score(rows, of)

    def _begin(self, spans: list[Span], positions_W: Any) -> None:
        self._spans = spans

    @contextmanager
    def _put(self, names: Collection[str]) -> Iterator[None]:
        modules = dict(self.taker.model.named_modules())
        cores = {
            f"{layer}.attn": modules[f"{layer}.attn"]
            for layer in self._layers
            if core_name(layer) in names and f"{layer}.attn" in modules
        }
        plain = {
            name: modules[name]
            for name, theirs in self._names.items()
            if name not in cores and not is_mixture(modules[name]) and any(each in names for each in theirs)
        }

        def computed(name: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: Any) -> Any:
            return self._operator(name, module, args, kwargs, given, names)

        with ExitStack() as stack:
            for layer in self._layers:
                if f"{layer}.{ROTARY}" in names:
                    stack.enter_context(self._rotated(layer))
            for name, module in modules.items():
                if is_mixture(module):
                    stack.enter_context(self._mixture(name, module, names))
            activations = {
                name: modules[name] for name in names if name.endswith(f".{_ACTIVATION}") and name in modules
            }
            stack.enter_context(hooked(activations, after=self._activation))
            stack.enter_context(hooked(cores, after=self._attention))
            stack.enter_context(hooked(plain, after=computed))
            yield

    def _called(self, name: str, *values: Any) -> Any:
        """Return the result of the giver's operator on vLLM's inputs."""
        theirs = self._by.theirs[name]
        dtype = next(theirs.parameters(), self._by.first).dtype
        with self._by.as_giver():
            return theirs(*(cast(value, dtype) for value in values))

    def _operator(
        self,
        name: str,
        module: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        given: Any,
        names: Collection[str],
    ) -> Any:
        import torch

        theirs = self._names[name]
        outputs = list(given) if isinstance(given, tuple) else [given]
        taken = args[0] if args else next(iter(kwargs.values()))
        if len(args) + len(kwargs) > 1 and len(outputs) > 1 and outputs[1] is not None:
            taken = outputs[1]
        parts = outputs[0].split(module.output_partition_sizes, dim=-1) if len(theirs) > 1 else [outputs[0]]
        new = [
            as_given(self._called(each, taken), part) if each in names else part
            for each, part in zip(theirs, parts, strict=True)
        ]
        outputs[0] = torch.cat(new, dim=-1) if len(new) > 1 else new[0]
        return tuple(outputs) if isinstance(given, tuple) else outputs[0]

    @contextmanager
    def _mixture(self, name: str, module: Any, names: Collection[str]) -> Iterator[None]:
        gate, experts = self._names[name]

        def choose(select: Select, hidden: Any, logits: Any) -> tuple[Any, Any]:
            weights, ids = select(hidden, logits)
            if gate in names:
                _, new, new_ids = self._called(gate, hidden)
                weights, ids = new.to(weights.dtype).contiguous(), new_ids.to(ids.dtype).contiguous()
            return weights, ids

        def computed(hidden: Any, weights: Any, ids: Any, given: Any) -> Any:
            return as_given(self._called(experts, hidden, ids.long(), weights), given) if experts in names else None

        with mixture_around(module, choose, computed):
            yield

    def _activation(self, name: str, _module: Any, args: tuple[Any, ...], _kwargs: dict[str, Any], given: Any) -> Any:
        gate, up = args[0].chunk(2, dim=-1)
        dtype = self._by.first.dtype
        with self._by.as_giver():
            new = self._by.theirs[name](cast(gate, dtype)) * cast(up, dtype)
        return as_given(new, given)

    def _rotation(self, layer: str) -> Callable[..., Any] | None:
        module = self._modules[layer]
        return getattr(sys.modules[type(module).__module__], _ROTATES, None)

    @contextmanager
    def _rotated(self, layer: str) -> Iterator[None]:
        """Make vLLM's rotary return transformers' result for one layer, in this context. All layers share vLLM's rotary
        module."""
        attention = dict(self.taker.model.named_modules())[layer]
        rotate, tables = self._rotation(layer), self._modules["model.rotary_emb"]
        assert rotate is not None
        width = self._modules[layer].head_dim

        def rotary(positions_W: Any, query: Any, key: Any) -> tuple[Any, ...]:
            heads = [self._heads(state, width) for state in (query, key)]
            with self._by.as_giver():
                cos, sin = tables(heads[0], positions_W[None])
                turned = rotate(*heads, cos, sin)
            return tuple(
                as_given(new.transpose(1, 2)[0], state) for new, state in zip(turned, (query, key), strict=True)
            )

        before = attention._modules.pop("rotary_emb")
        attention.rotary_emb = rotary
        try:
            yield
        finally:
            del attention.rotary_emb
            attention._modules["rotary_emb"] = before

    def _heads(self, state: Any, width: int) -> Any:
        """Return vLLM's queries, keys or values [W, N D] in the giver's layout, [1, N, W, D]."""
        return cast(state, self._by.first.dtype).reshape(1, len(state), -1, width).transpose(1, 2)

    def _attention(self, name: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: Any) -> Any:
        core, new = core_name(name.rpartition(".")[0]), given.clone()
        for seq_id, where, _ in self._spans:
            function, theirs, mask, words = self._masks_of(seq_id)[core]
            heads = [self._heads(state[where], module.head_size) for state in states_of(args, kwargs)]
            with self._by.as_giver():
                made = function(theirs, *heads, mask, **words)[0]
            new[where] = as_given(made, new[where])
        return new

    def _masks_of(self, seq_id: str) -> dict[str, Any]:
        """Return transformers' attention functions and masks for a single sequence."""
        if seq_id not in self._masks:
            row = self._rows[seq_id]
            ids = np.concatenate([row.prompt_ids, row.response_ids]).astype(np.int64)[None]
            batch = PaddedBatch(
                rows=(row,), ids_BW=ids, mask_BW=np.ones_like(ids), first_B=np.array([len(row.prompt_ids)])
            )
            self._masks[seq_id] = self._by.masks_of(batch)
        return self._masks[seq_id]


class VllmGiver(Graft):
    """Replacement of projections, norms and the embedding in a transformers model by those of vLLM.

    vLLM's other operators need its KV cache.
    """

    def __init__(self, taker: Execution, giver: VllmExecution):
        self.taker = taker
        self._ours = operators(taker.model)
        modules = dict(giver.model.named_modules())
        self.theirs: dict[str, Callable[..., Any]] = {}
        """Name in transformers -> function that runs vLLM's computation on the same inputs."""
        for name, parts in names(giver.model).items():
            if is_mixture(modules[name]):
                gate, experts = parts
                self.theirs |= {gate: _gate(modules[gate], modules[name]), experts: _experts(modules[name])}
            elif name.rpartition(".")[2] not in ("attn", "rotary_emb"):
                self.theirs |= {each: _part(modules[name], place, len(parts)) for place, each in enumerate(parts)}

    def names(self, rows: Sequence[RecordedRow], of: list[RecordedRow]) -> list[str]:
        return [name for name in self._ours if name in self.theirs]

    @contextmanager
    def put(self, names: Collection[str], batch: Any) -> Iterator[None]:
        with hooked({name: self._ours[name] for name in names}, after=self._computed):
            yield

    def _computed(self, name: str, _module: Any, args: tuple[Any, ...], _kwargs: dict[str, Any], given: Any) -> Any:
        import torch

        with torch._C.DisableTorchFunction(), torch.inference_mode():
            new = self.theirs[name](*args)
        return as_given(new, given)


def _part(module: Any, place: int, number: int) -> Callable[..., Any]:
    """Return a function that runs a vLLM module, or one of the projections that the module fuses."""

    def computed(taken: Any) -> Any:
        flat = cast(taken, next(module.parameters()).dtype)
        new = module(flat.flatten(0, 1) if flat.dim() > 1 else flat)
        new = new[0] if isinstance(new, tuple) else new
        return (new.split(module.output_partition_sizes, dim=-1)[place] if number > 1 else new).clone()

    return computed


def _gate(gate: Any, module: Any) -> Callable[..., Any]:
    """Return a function that runs a vLLM mixture's router, with the outputs that transformers has: logits, weights and
    experts."""

    def computed(taken: Any) -> Any:
        hidden = cast(taken, gate.weight.dtype).reshape(-1, taken.shape[-1])
        logits = gate(hidden)
        logits = logits[0] if isinstance(logits, tuple) else logits
        return logits.clone(), *in_order(*module.router.select_experts(hidden, logits))

    return computed


def _experts(module: Any) -> Callable[..., Any]:
    """Return a function that runs the experts in a vLLM mixture."""
    experts = module.routed_experts

    def computed(taken: Any, ids: Any, weights: Any) -> Any:
        hidden = cast(taken, experts.w13_weight.dtype).reshape(-1, taken.shape[-1]).contiguous()
        topk = {"topk_weights": weights.float().contiguous(), "topk_ids": ids.int().contiguous()}
        return experts.forward_modular(x=hidden, **topk).clone()

    return computed


AnyGraft = Graft | VllmTaker


def can_patch(taker: AnyExecution, giver: AnyExecution) -> bool:
    """Return True if a giver's operators can be put into a taker. Those of vLLM fit only into a transformers model."""
    return not isinstance(giver, VllmExecution) or type(taker) is Execution


def graft_of(taker: AnyExecution, giver: AnyExecution) -> AnyGraft:
    """Return the graft that puts a giver's operators into a taker; `can_patch` must allow the pair."""
    if isinstance(giver, VllmExecution):
        assert isinstance(taker, Execution)
        return VllmGiver(taker, giver)
    if isinstance(taker, VllmExecution):
        return VllmTaker(taker, giver)
    if isinstance(taker, ExactExecution):
        return ExactTaker(taker, giver)
    return ExactGiver(taker, giver) if isinstance(giver, ExactExecution) else Graft(taker, giver)
