"""From exact hidden states to log-probabilities.

Shapes: M tokens, C tokens per chunk, H hidden width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch

from .functions import divided, exp, log
from .layers import Linear
from .precision import Precision
from .slices import sum_of_units

CHUNK_BYTES = 128 << 20
"""Maximum size of the float64 logits in memory at a time."""


class ExactHead:
    """The projection to the vocabulary, sliced once, and its log-softmax."""

    def __init__(self, held: Any, precision: Precision, temperature: float, projection_dtype: Any = None):
        """`projection_dtype` is the dtype that logits are first rounded to; None for the dtype of the activations."""
        projection = held.get_output_embeddings()
        self._linear = Linear(projection.weight, projection.bias, precision, projection_dtype)
        self._chunk = max(1, CHUNK_BYTES // (8 * projection.weight.shape[0]))
        self._precision, self._temperature = precision, temperature

    def logprobs(self, hidden_MH: Any, ids_M: Any) -> Any:
        """Return the log-probabilities [M], nats, of tokens `ids_M`; float32, or float64 for a float64 model."""
        wide = torch.float64 if self._precision.dtype == torch.float64 else torch.float32
        parts = [
            self._of(hidden_MH[start : start + self._chunk], ids_M[start : start + self._chunk])
            for start in range(0, len(hidden_MH), self._chunk)
        ]
        return torch.cat(parts).to(wide) if parts else hidden_MH.new_zeros(0, dtype=wide)

    def _of(self, hidden_CH: Any, ids_C: Any) -> Any:
        logits_CV = self._precision.wide(self._linear(hidden_CH))
        if self._temperature != 1.0:
            logits_CV = self._precision.wide(divided(logits_CV, self._temperature))
        shifted_CV = logits_CV.sub_(logits_CV.amax(dim=-1, keepdim=True))
        taken_C1 = shifted_CV.gather(-1, ids_C[:, None])
        return (taken_C1 - log(sum_of_units(exp(shifted_CV)))).squeeze(-1)
