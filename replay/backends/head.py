"""Shapes: N tokens, C tokens per chunk, H hidden width, V vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...tracer.dense import Projection
from ..batching import ForwardBatch

CHUNK_BYTES = 128 << 20
"""Maximum size of the logits in memory at once (bytes)."""


class BatchScorer:
    grad_enabled = False
    """True if the recorded pass computed gradients, which affects kernel selection."""

    def __call__(self, batch: ForwardBatch) -> Any:
        """Return the log-probabilities [N] of all rows' response tokens in nats."""
        with torch.set_grad_enabled(self.grad_enabled):
            return self.logprobs(batch).detach()

    def logprobs(self, batch: Any) -> Any:
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Computes log-probabilities like vLLM's sampler: divides logits by the temperature, applies top-k, then top-p, and
    normalises. Tokens removed by top-k or top-p get -inf."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    projection_dtype: Any = None
    """torch dtype for the projection, or None for the hidden states' dtype."""
    logits_dtype: Any = None
    """torch dtype of logits and all values computed from them. None means float32 (float64 for a float64 head)."""

    def logprobs(self, model: Any, hidden_NH: Any, ids_N: Any) -> Any:
        """Return the log-probabilities [N] of `ids_N` (nats), given the preceding tokens' hidden states."""
        projection = Projection(model=model, dtype=self.projection_dtype)
        dtype = self.projection_dtype or hidden_NH.dtype
        hidden_NH, ids_N = (tensor.to(projection.head.weight.device) for tensor in (hidden_NH, ids_N))
        result = self.logits_dtype or (torch.float64 if dtype == torch.float64 else torch.float32)
        chunk = max(1, CHUNK_BYTES // (projection.head.weight.shape[0] * max(4, result.itemsize)))
        parts = zip(projection.logits(hidden_NH, chunk), ids_N.split(chunk), strict=True)
        return torch.cat([self.taken(logits_CV.to(result), ids_C) for logits_CV, ids_C in parts])

    def taken(self, logits_CV: Any, ids_C: Any) -> Any:
        """Return the log-probabilities [C] of `ids_C` (nats). Overwrites the logits unless they need a gradient."""
        if self.temperature != 1.0:
            logits_CV = logits_CV / self.temperature if logits_CV.requires_grad else logits_CV.div_(self.temperature)
        logits_CV = cut(logits_CV, self.top_k, self.top_p)
        if logits_CV.dtype in (torch.bfloat16, torch.float16):
            # For 16-bit logits, use log_softmax as TRL and verl do. It rounds only its result.
            return logits_CV.log_softmax(dim=-1).gather(-1, ids_C[:, None]).squeeze(-1)
        return logits_CV.gather(-1, ids_C[:, None]).squeeze(-1) - torch.logsumexp(logits_CV, dim=-1)


def cut(logits_CV: Any, top_k: int | None, top_p: float | None) -> Any:
    if top_k is not None and top_k < logits_CV.shape[-1]:
        least_C1 = logits_CV.topk(top_k, dim=-1).values[..., -1:]
        logits_CV = logits_CV.masked_fill(logits_CV < least_C1, float("-inf"))
    if top_p is not None and top_p < 1:
        ascending_CV, order_CV = logits_CV.sort(dim=-1)
        outside_CV = ascending_CV.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p
        outside_CV[..., -1] = False
        logits_CV = logits_CV.masked_fill(torch.zeros_like(outside_CV).scatter(-1, order_CV, outside_CV), float("-inf"))
    return logits_CV
