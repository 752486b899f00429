"""Shapes: B rows in a forward pass, W padded row length, N scored tokens, T response tokens per row, H hidden width, V
vocabulary."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import torch

from ...schemas.errors import CannotReplay
from ...tracer.store import first_line
from ..arm_option import FACTORY, phrase
from ..arms import Arm
from ..batching import ForwardBatch, PackedBatch, PaddedBatch, cached_ends
from ..settings import autocast
from . import packing
from .double import KeepDouble
from .head import BatchScorer, Head


class TransformersScorer(BatchScorer):
    """Runs the backbone, then projects only the hidden states that predict response tokens."""

    name = "tim_trace.replay.backends.transformers.TransformersScorer"

    def __init__(
        self, model: Any, head: Head, *, cached_tokens: int | None = None, kv_dtype: str | None = None,
        autocast_dtype: Any = None, compile: bool = False,
    ):  # fmt: skip
        self._model = model.eval()
        self._head = head
        self._cached_tokens = cached_tokens
        self._kv_dtype = kv_dtype
        self._autocast = autocast_dtype
        self._compiled = torch.compile(model.base_model, dynamic=True) if compile else None

    def logprobs(self, batch: ForwardBatch) -> Any:
        with KeepDouble() if next(self._model.parameters()).dtype == torch.float64 else nullcontext():
            with autocast(self._device, self._autocast):
                hidden_WH, ids_W = self._packed(batch) if isinstance(batch, PackedBatch) else self._padded(batch)
            # Move indices to the device of the indexed tensor: the first and last layer may be on different devices.
            before_N = torch.from_numpy(batch.before_N).to(hidden_WH.device)
            scored_N = torch.from_numpy(batch.scored_N).to(self._device)
            return self._head.logprobs(self._model, hidden_WH[before_N], ids_W[scored_N])

    @property
    def _device(self) -> Any:
        return next(self._model.parameters()).device

    def _padded(self, batch: PaddedBatch) -> tuple[Any, Any]:
        ids_BW = torch.from_numpy(batch.ids_BW).to(self._device)
        mask_BW = torch.from_numpy(batch.mask_BW).to(self._device)
        if self._cached_tokens is None:
            hidden_BWH = self._backbone(input_ids=ids_BW, attention_mask=mask_BW).last_hidden_state
        else:
            # As in sampling, first run the whole prompt, then the response through the KV cache, in chunks.
            cached, parts = {"past_key_values": kv_cache(self._model.config, self._kv_dtype), "use_cache": True}, []
            for start, end in pairwise(cached_ends(batch, self._cached_tokens)):
                output = self._backbone(input_ids=ids_BW[:, start:end], attention_mask=mask_BW[:, :end], **cached)
                parts.append(output.last_hidden_state)
            hidden_BWH = torch.cat(parts, dim=1)
        return hidden_BWH.flatten(0, 1), ids_BW.flatten()

    def _packed(self, batch: PackedBatch) -> tuple[Any, Any]:
        ids_1W = torch.from_numpy(batch.ids_BW).to(self._device)
        inputs = {"input_ids": ids_1W, "position_ids": torch.from_numpy(batch.positions_W).to(self._device)[None]}
        if self._model.config._attn_implementation != packing.NAME:
            # Pass no spans: as in the recorded run, transformers splits the rows where positions restart at 0.
            return self._backbone(**inputs).last_hidden_state[0], ids_1W[0]
        rows = packing.RowSpans(batch.spans)
        output = self._backbone(**inputs, packed=rows)
        packing.check_all(rows, self._model.config)
        return output.last_hidden_state[0], ids_1W[0]

    def _backbone(self, **inputs: Any) -> Any:
        inputs.setdefault("use_cache", False)
        if self._compiled is None:
            return self._model.base_model(**inputs)
        try:
            return self._compiled(**inputs)
        except RuntimeError as error:
            if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
                raise
            raise CannotReplay(
                f"compile: torch.compile failed on this model and machine: {first_line(error)}; replay without compile"
            ) from error


def kv_cache(config: Any, kv_dtype: str | None) -> Any:
    """Return a KV cache. `fp8` rounds keys and values to e4m3 with scale 1 (vLLM docs, "Quantized KV cache")."""
    from transformers import DynamicCache

    if kv_dtype is None:
        return DynamicCache(config=config)
    largest = torch.finfo(torch.float8_e4m3fn).max

    class Fp8Cache(DynamicCache):  # type: ignore[misc]
        def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
            def rounded(states: Any) -> Any:
                return states.clamp(-largest, largest).to(torch.float8_e4m3fn).to(states.dtype)

            return super().update(rounded(key_states), rounded(value_states), *args, **kwargs)

    return Fp8Cache(config=config)


def gives_hidden(model: Any) -> bool:
    return hasattr(model, "base_model") and hasattr(model, "get_output_embeddings") and hasattr(model, "config")


class ModuleScorer(BatchScorer):
    """Scores with a `model(input_ids=[B, W], attention_mask=[B, W])` that returns logits [B, W, V], or `.logits`."""

    name = "tim_trace.replay.backends.transformers.ModuleScorer"

    def __init__(self, model: Any, head: Head, arm: Arm):
        for name in arm.lacking(FACTORY):
            raise CannotReplay(
                f"{phrase(name, getattr(arm, name))} is not possible, because the model factory's model returns only "
                "logits; add base_model, get_output_embeddings and config to the model, as in transformers models"
            )
        self._model = model.eval()
        self._head = head

    def logprobs(self, batch: PaddedBatch) -> Any:
        device = next(self._model.parameters()).device
        ids_BW, mask_BW = torch.from_numpy(batch.ids_BW).to(device), torch.from_numpy(batch.mask_BW).to(device)
        logits_BWV = self._model(input_ids=ids_BW, attention_mask=mask_BW)
        logits_BWV = getattr(logits_BWV, "logits", logits_BWV)
        parts = []
        for first, row, logits_WV, ids_W in zip(batch.first_B.tolist(), batch.rows, logits_BWV, ids_BW, strict=True):
            end = first + len(row.response_ids)
            logits_TV = logits_WV[first - 1 : end - 1]
            result = self._head.logits_dtype or torch.promote_types(logits_TV.dtype, torch.float32)
            parts.append(self._head.taken(logits_TV.to(result, copy=True), ids_W[first:end]))
        return torch.cat(parts)
