"""Scoring with exact layers: prefill, packed, or through the KV cache, with the same bits.

Shapes: B rows in a forward pass (1 if packed), W row length including padding, N scored tokens, H hidden width.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ...batching import ForwardBatch, PackedBatch
from .model import ExactModel


class ExactScorer:
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

    def __call__(self, batch: ForwardBatch) -> Any:
        """Return the log-probabilities [N], nats, of the batch's response tokens, row by row."""
        with torch.no_grad():
            ids_BW, positions_BW, rows_BW = (torch.from_numpy(part).to(self._model.device) for part in laid(batch))
            hidden_BWH = self._hidden(ids_BW, positions_BW, rows_BW, self._ends(batch))
            scored_N = torch.from_numpy(batch.scored_N).to(self._model.device)
            head = self._model.head(self._temperature, self._head_dtype)
            # A token is predicted from the hidden state before it.
            return head.logprobs(hidden_BWH.flatten(0, 1)[scored_N - 1], ids_BW.flatten()[scored_N])

    def _ends(self, batch: ForwardBatch) -> list[int]:
        """Return the end column of each forward: a single one, or the prompt followed by chunks of the response."""
        if self._cached_tokens is None or isinstance(batch, PackedBatch):
            return [batch.width]
        prompt = batch.width - batch.num_kept
        return [prompt, *range(prompt + self._cached_tokens, batch.width, self._cached_tokens), batch.width]

    def _hidden(self, ids_BW: Any, positions_BW: Any, rows_BW: Any, ends: list[int]) -> Any:
        caches = self._model.caches(*ids_BW.shape)
        start, parts = 0, []
        for end in ends:
            if end > start:
                so_far = (positions_BW[:, :end], rows_BW[:, :end])
                parts.append(self._model.hidden(ids_BW[:, start:end], *so_far, caches))
                start = end
        return torch.cat(parts, dim=1)


def laid(batch: ForwardBatch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return [B, W] ids, positions within the row, and row numbers (0 for padding) of a forward."""
    if isinstance(batch, PackedBatch):
        rows_W = np.repeat(np.arange(len(batch.rows)) + 1, np.diff(batch.ends_B, prepend=0))
        return batch.ids_W[None], batch.positions_W[None], rows_W[None]
    return batch.ids_BW, np.maximum(batch.mask_BW.cumsum(axis=1) - 1, 0), batch.mask_BW
