"""Compute captured distributions from a model's last hidden states, in chunks of tokens.

Shapes: N tokens, C tokens per chunk, H hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..schemas.capture import LOGITS, Capture
from .dense import Distribution, Logits, TopK
from .logits import scaled, top_k_with_tail

CHUNK_BYTES = 256 << 20
"""Maximum size of temporary float32 logits, bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """A model's output head as a pass applies it."""

    model: Any
    dtype: Any = None
    """torch dtype for the matrix product; None for the dtype of the hidden states."""

    @property
    def head(self) -> Any:
        return self.model.get_output_embeddings()

    def logits(self, hidden_NH: Any, chunk: int) -> Iterator[Any]:
        """Yield [C, V] logits for up to `chunk` tokens at a time, scaled and capped, before the temperature."""
        import torch

        dtype, config = self.dtype or hidden_NH.dtype, self.model.config.get_text_config()
        weight_VH = self.head.weight.to(dtype)
        bias_V = None if self.head.bias is None else self.head.bias.to(dtype)
        for hidden_CH in hidden_NH.split(chunk):
            yield scaled(torch.nn.functional.linear(hidden_CH.to(dtype), weight_VH, bias_V), config)

    def distribution(self, hidden: Sequence[Any], capture: Capture, temperature: float) -> Distribution:
        """Return the captured distributions for rows of hidden states [T, H], concatenated."""
        import torch

        with torch.no_grad():
            kept = _Kept(sum(len(rows) for rows in hidden))
            chunk = max(1, CHUNK_BYTES // (4 * self.head.weight.shape[0]))
            for rows_TH in hidden:
                for logits_CV in self.logits(rows_TH, chunk):
                    if capture.level == LOGITS:
                        kept.add(logits_CV)
                    else:
                        kept.add(*top_k_with_tail(logits_CV, capture.k or 1, temperature))
        return Logits(logits=kept.arrays[0]) if capture.level == LOGITS else TopK.of(*kept.arrays)


class _Kept:
    """Preallocated arrays with N rows that are filled chunk by chunk."""

    def __init__(self, num_rows: int):
        self.arrays: list[Any] = []
        self._num_rows, self._filled = num_rows, 0

    def add(self, *chunks: Any) -> None:
        """Append rows to each array."""
        if not self.arrays:
            self.arrays = [chunk.new_empty((self._num_rows, *chunk.shape[1:])) for chunk in chunks]
        end = self._filled + len(chunks[0])
        for array, chunk in zip(self.arrays, chunks, strict=True):
            array[self._filled : end].copy_(chunk)
        self._filled = end
