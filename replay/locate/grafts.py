"""Run one execution (the taker) with operators from the other (the giver), on the taker's inputs. Copying the giver's
results instead would also copy the effects of all earlier differences.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from ..backends import kernels
from ..backends.double import KeepDouble
from ..backends.vllm_mixture import in_order, is_mixture
from ..batching import ForwardBatch, PaddedBatch
from ..recorded import RecordedRow
from ..settings import autocast
from . import taps
from .execution import ExactExecution, Execution
from .names import ATTENTION, core_name
from .vllm_execution import VllmExecution, names


class Graft:
    """Runs the taker's model with some of its operators replaced by the giver's."""

    def __init__(self, taker: Execution, giver: Execution):
        self.taker, self._giver = taker, giver
        self.theirs: Mapping[str, Any] = taps.operators(giver.model)
        self._ours = taps.operators(taker.model)
        self._masks: dict[tuple[int, ...], dict[str, Any]] = {}

    def names(self, rows: Sequence[RecordedRow], of: list[RecordedRow]) -> list[str]:
        """Return the names of the operators in both models. Attention is included only if all batches are padded."""
        common = [name for name in self._ours if name in self.theirs]
        scorer = self.taker.scorer
        if not all(isinstance(batch, PaddedBatch) for batch in scorer.batches(scorer.together(list(rows), of))):
            return common
        return [*common, *map(core_name, taps.attention_layers(self.taker.model))]

    def score(
        self, names: Collection[str], rows: Sequence[RecordedRow], of: list[RecordedRow]
    ) -> dict[str, np.ndarray]:
        return self.taker.score(rows, of, lambda batch: self.put(names, batch))

    @contextmanager
    def put(self, names: Collection[str], batch: ForwardBatch) -> Iterator[None]:
        masks = self._masks_of(batch) if any(name.endswith(f".{ATTENTION}") for name in names) else {}
        ours = {id(module): name for name, module in self.taker.model.named_modules()}

        def around(module: Any, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            name = core_name(ours.get(id(module), ""))
            if name not in names or name not in masks:
                return original(module, *args, **kwargs)
            function, theirs, mask, words = masks[name]
            dtype = self._first.dtype if self._autocast is None else self._narrowed(args[0].dtype)
            with self._as_giver():
                given = function(theirs, *(cast(state, dtype) for state in args[:3]), mask, **words)[0]
            return cast(given, args[0].dtype), None

        chosen = {name: self._ours[name] for name in names if name in self._ours}
        with taps.hooked(chosen, after=self._computed), taps.attention_around(around):
            yield

    def _computed(self, name: str, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: Any) -> Any:
        theirs, takes = self.theirs[name], taps.tensors_of(args, kwargs)
        dtype = next(theirs.parameters(), self._first).dtype
        floating = [value.dtype for value in takes if value.is_floating_point()]
        if self._autocast is not None and floating:
            dtype = self._narrowed(floating[0])
        args, kwargs = taps.with_tensors(args, kwargs, [cast(value, dtype) for value in takes])
        with self._as_giver():
            new = theirs(*args, **kwargs)
        return as_given(new, given)

    @property
    def _first(self) -> Any:
        return next(self._giver.model.parameters())

    def _narrowed(self, dtype: Any) -> Any:
        return self._first.dtype if dtype == torch.float64 else dtype

    @property
    def _autocast(self) -> Any:
        return self._giver.scorer.numerics.autocast

    @contextmanager
    def _as_giver(self) -> Iterator[None]:
        with (
            KeepDouble() if self._first.dtype == torch.float64 else torch._C.DisableTorchFunction(),
            autocast(self._first.device, self._autocast),
            kernels.forced(self._giver.arm.attention),
        ):
            yield

    def _masks_of(self, batch: ForwardBatch) -> dict[str, Any]:
        key = tuple(hash(row.seq_id) for row in batch.rows)
        if key not in self._masks:
            found: dict[str, Any] = {}
            names = {id(module): name for name, module in self._giver.model.named_modules()}

            def around(module: Any, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
                mask = args[3] if len(args) > 3 else kwargs.get("attention_mask")
                words = {name: value for name, value in kwargs.items() if name != "attention_mask"}
                found[core_name(names.get(id(module), ""))] = (original, module, mask, words)
                return original(module, *args, **kwargs)

            assert isinstance(batch, PaddedBatch)
            device = self._first.device
            ids_BW, mask_BW = torch.from_numpy(batch.ids_BW).to(device), torch.from_numpy(batch.mask_BW).to(device)
            with torch.no_grad(), self._as_giver(), taps.attention_around(around):
                self._giver.model.base_model(input_ids=ids_BW, attention_mask=mask_BW, use_cache=False)
            self._masks = {key: found}
        return self._masks[key]


def cast(value: Any, dtype: Any) -> Any:
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    with torch._C.DisableTorchFunction():  # KeepDouble would skip casts to float32
        return value.to(dtype) if is_float and dtype is not None else value


def as_given(new: Any, given: Any) -> Any:
    with torch._C.DisableTorchFunction():  # KeepDouble would skip casts to float32
        pairs = zip(taps.outputs_of(new), taps.outputs_of(given), strict=True)
        return taps.with_outputs(given, [part.to(old.dtype).reshape(old.shape) for part, old in pairs])


class VllmGiver(Graft):
    """Replaces a transformers model's projections, norms and embedding with vLLM's. Operators that need vLLM's KV cache
    are not replaced."""

    def __init__(self, taker: Execution, giver: VllmExecution):
        self.taker = taker
        self._ours = taps.operators(taker.model)
        modules = dict(giver.model.named_modules())
        self.theirs: dict[str, Callable[..., Any]] = {}
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
        with taps.hooked({name: self._ours[name] for name in names}, after=self._computed):
            yield

    def _computed(self, name: str, _module: Any, args: tuple[Any, ...], _kwargs: dict[str, Any], given: Any) -> Any:
        with torch._C.DisableTorchFunction(), torch.inference_mode():
            new = self.theirs[name](*args)
        return as_given(new, given)


def _part(module: Any, place: int, number: int) -> Callable[..., Any]:

    def computed(taken: Any) -> Any:
        flat = cast(taken, next(module.parameters()).dtype)
        new = module(flat.flatten(0, 1) if flat.dim() > 1 else flat)
        new = new[0] if isinstance(new, tuple) else new
        return (new.split(module.output_partition_sizes, dim=-1)[place] if number > 1 else new).clone()

    return computed


def _gate(gate: Any, module: Any) -> Callable[..., Any]:
    def computed(taken: Any) -> Any:
        hidden = cast(taken, gate.weight.dtype).reshape(-1, taken.shape[-1])
        logits = gate(hidden)
        logits = logits[0] if isinstance(logits, tuple) else logits
        return logits.clone(), *in_order(*module.router.select_experts(hidden, logits))

    return computed


def _experts(module: Any) -> Callable[..., Any]:
    experts = module.routed_experts

    def computed(taken: Any, ids: Any, weights: Any) -> Any:
        hidden = cast(taken, experts.w13_weight.dtype).reshape(-1, taken.shape[-1]).contiguous()
        topk = {"topk_weights": weights.float().contiguous(), "topk_ids": ids.int().contiguous()}
        return experts.forward_modular(x=hidden, **topk).clone()

    return computed


def graft_of(taker: Execution, giver: Execution) -> Graft | None:
    if type(taker) is not Execution or isinstance(giver, ExactExecution):
        return None
    return VllmGiver(taker, giver) if isinstance(giver, VllmExecution) else Graft(taker, giver)
