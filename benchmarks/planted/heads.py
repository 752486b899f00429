"""Compute the log-probabilities that a pass records from hidden states.

Shapes: N tokens, H hidden units, V vocabulary, R padded rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    @property
    def truncates(self) -> bool:
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0

    def process(self, logits: Tensor) -> Tensor:
        """Return logits [N, V] after temperature, with -inf for tokens cut by truncation."""
        logits = logits / self.temperature if self.temperature != 1.0 else logits
        if self.top_k > 0:
            least = logits.topk(min(self.top_k, logits.shape[-1]), dim=-1).values[:, -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        if self.min_p > 0.0:
            probs = logits.softmax(-1)
            logits = logits.masked_fill(probs < self.min_p * probs.amax(-1, keepdim=True), -torch.inf)
        if self.top_p < 1.0:
            probs, order = logits.softmax(-1).sort(dim=-1, descending=True)
            cut = torch.zeros_like(probs, dtype=torch.bool).scatter(-1, order, probs.cumsum(-1) - probs >= self.top_p)
            logits = logits.masked_fill(cut, -torch.inf)
        return logits


UNCHANGED = Sampling()
"""Sampling from the model's own distribution."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Head:
    """The computation from a model's last hidden state to recorded log-probabilities."""

    sampling: Sampling = UNCHANGED
    """Settings applied to the logits before the log-softmax; neutral: none."""
    matmul: torch.dtype | None = None
    """dtype of the matrix product with the embedding; None is the model's own."""
    softmax: torch.dtype = torch.float32
    padded_rows: Tensor | None = None
    """[R, H] rows of the output matrix beyond the vocabulary; None if there are none."""

    def logits(self, hidden: Tensor, weight: Tensor, cap: float | None = None) -> Tensor:
        """Return float32 logits [N, V + R] from hidden states [N, H] and the output matrix [V, H]."""
        if self.padded_rows is not None:
            weight = torch.cat([weight, self.padded_rows.to(weight.dtype)])
        dtype = self.matmul or hidden.dtype
        logits = (hidden.to(dtype) @ weight.to(dtype).T).float()
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def log_softmax(self, logits: Tensor) -> Tensor:
        """Return float32 log-probabilities [N, V + R] from logits [N, V + R]."""
        return self.sampling.process(logits).to(self.softmax).log_softmax(-1).float()


PLAIN = Head()
"""Return the log-softmax of the model's own logits."""
