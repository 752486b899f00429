"""Scoring with a transformers model and a head of ours: prefill, or through the KV cache.

Shapes: B rows of a forward, W its width, K its scored positions, H hidden width.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from ..batching import ForwardBatch
from .double import keep_double
from .head import Head


class TransformersScorer:
    """Runs the backbone and projects the positions before response tokens."""

    name = "tim_trace.replay.backends.transformers.TransformersScorer"

    def __init__(self, model: Any, head: Head, *, cached_tokens: int | None = None, autocast: Any = None):
        """`cached_tokens` tokens at a time go through the KV cache after the prompt; None for one forward."""
        self._model = model.eval()
        self._head = head
        self._cached_tokens = cached_tokens
        self._autocast = autocast

    def __call__(self, batch: ForwardBatch) -> Any:
        """[B, K] log-probabilities of the batch's last K tokens."""
        import torch

        device = next(self._model.parameters()).device
        ids_BW = torch.from_numpy(batch.ids_BW).to(device)
        mask_BW = torch.from_numpy(batch.mask_BW).to(device)
        double = next(self._model.parameters()).dtype == torch.float64
        cast = torch.autocast(device.type, self._autocast) if self._autocast is not None else nullcontext()
        with torch.no_grad(), cast, keep_double() if double else nullcontext():
            if self._cached_tokens is None:
                hidden_BWH = self._backbone(ids_BW, mask_BW)[0]
            else:
                hidden_BWH = self._through_cache(ids_BW, mask_BW, batch.num_kept)
            keep = batch.num_kept
            hidden_NH = hidden_BWH[:, -keep - 1 : -1].reshape(-1, hidden_BWH.shape[-1])
            logprobs_N = self._head.logprobs(self._model, hidden_NH, ids_BW[:, -keep:].reshape(-1))
        return logprobs_N.view(len(ids_BW), keep)

    def _backbone(self, ids_BW: Any, mask_BW: Any, cache: Any = None) -> tuple[Any, Any]:
        output = self._model.base_model(
            input_ids=ids_BW, attention_mask=mask_BW, past_key_values=cache, use_cache=cache is not None
        )
        return output.last_hidden_state, output.past_key_values

    def _through_cache(self, ids_BW: Any, mask_BW: Any, keep: int) -> Any:
        """The prompt in one go, then the recorded tokens, as an engine that samples would see them."""
        import torch
        from transformers import DynamicCache

        assert self._cached_tokens is not None
        width = ids_BW.shape[1]
        cache: Any = DynamicCache(config=self._model.config)
        start, parts = 0, []
        ends = [width - keep, *range(width - keep + self._cached_tokens, width, self._cached_tokens), width]
        for end in ends:
            if end > start:
                hidden, cache = self._backbone(ids_BW[:, start:end], mask_BW[:, :end], cache)
                parts.append(hidden)
                start = end
        return torch.cat(parts, dim=1)
