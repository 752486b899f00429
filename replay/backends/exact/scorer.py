"""Scoring with exact layers: prefill, packed, or through the KV cache, with the same bits.

Shapes: B rows in a forward pass (1 if packed), W row length including padding, N scored tokens, H hidden width.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch

from ...batching import ForwardBatch, PackedBatch, cached_ends
from ..head import BatchScorer
from .model import ExactModel


class ExactScorer(BatchScorer):
    """Scores a token bit-identically for every batch, padding, chunking and thread count.

    Positions count only a row's own tokens, so that padding does not shift them.
    """

    name = "tim_trace.replay.backends.exact.scorer.ExactScorer"

    def __init__(
        self, model: ExactModel, *, temperature: float = 1.0, head_dtype: Any = None, cached_tokens: int | None = None
    ):
        """`cached_tokens` is the number of response tokens per forward through the KV cache; None for one forward."""
        self._model, self._temperature, self._head_dtype = model, temperature, head_dtype
        self._cached_tokens = cached_tokens

    def logprobs(self, batch: ForwardBatch) -> Any:
        ids_BW, positions_BW, rows_BW = (torch.from_numpy(part).to(self._model.device) for part in laid(batch))
        caches = self._model.caches(*ids_BW.shape)
        parts = [
            self._model.hidden(ids_BW[:, start:end], positions_BW[:, :end], rows_BW[:, :end], caches)
            for start, end in pairwise(cached_ends(batch, self._cached_tokens))
        ]
        scored_N = torch.from_numpy(batch.scored_N).to(self._model.device)
        head = self._model.head(self._temperature, self._head_dtype)
        # A token is predicted from the hidden state before it.
        return head.logprobs(torch.cat(parts, dim=1).flatten(0, 1)[scored_N - 1], ids_BW.flatten()[scored_N])


def laid(batch: ForwardBatch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return [B, W] ids, positions within the row, and row numbers (0 for padding) of a forward."""
    if isinstance(batch, PackedBatch):
        rows_W = np.repeat(np.arange(len(batch.rows)) + 1, np.diff(batch.ends_B, prepend=0))
        return batch.ids_W[None], batch.positions_W[None], rows_W[None]
    return batch.ids_BW, np.maximum(batch.mask_BW.cumsum(axis=1) - 1, 0), batch.mask_BW
