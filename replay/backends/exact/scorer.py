"""Scoring with exact layers: prefill, or through a cache of keys and values; the bits are the same.

Shapes: B rows of a forward, W its width, K its scored positions, H hidden width.
"""

from __future__ import annotations

from typing import Any

from ...batching import ForwardBatch
from .head import ExactHead
from .model import ExactModel


class ExactScorer:
    """Gives a token the same bits in every batch, padding, chunking, thread count and beside any neighbours.

    Positions count a row's own tokens, so that padding moves none.
    """

    name = "tim_trace.replay.backends.exact.scorer.ExactScorer"

    def __init__(
        self, model: ExactModel, *, temperature: float = 1.0, head_dtype: Any = None, cached_tokens: int | None = None
    ):
        """`cached_tokens` tokens at a time go through the cache after the prompt; None for one forward."""
        self._model, self._temperature, self._head_dtype = model, temperature, head_dtype
        self._cached_tokens = cached_tokens

    def __call__(self, batch: ForwardBatch) -> Any:
        """[B, K] log-probabilities of the batch's last K tokens."""
        import torch

        device, keep = self._model.device, batch.num_kept
        ids_BW = torch.from_numpy(batch.ids_BW).to(device)
        mask_BW = torch.from_numpy(batch.mask_BW).to(device)
        with torch.no_grad():
            hidden_BWH = self._hidden(ids_BW, mask_BW, keep)
            hidden_MH = hidden_BWH[:, -keep - 1 : -1].reshape(-1, hidden_BWH.shape[-1])
            head = self._model.head(self._temperature, self._head_dtype)
            logprobs_M = head.logprobs(hidden_MH, ids_BW[:, -keep:].reshape(-1))
        return logprobs_M.view(len(ids_BW), keep)

    def _hidden(self, ids_BW: Any, mask_BW: Any, keep: int) -> Any:
        import torch

        width = ids_BW.shape[1]
        positions_BW = (mask_BW.cumsum(dim=1) - 1).clamp(min=0)
        caches = self._model.caches(len(ids_BW), width)
        size = self._cached_tokens
        ends = [width] if size is None else [width - keep, *range(width - keep + size, width, size), width]
        start, parts = 0, []
        for end in ends:
            if end > start:
                seen = (positions_BW[:, :end], mask_BW[:, :end])
                parts.append(self._model.hidden(ids_BW[:, start:end], *seen, caches))
                start = end
        return torch.cat(parts, dim=1)
