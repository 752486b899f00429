"""Logits and captured distributions from hidden states: scale, cap, top K.

Shapes: T tokens, N tokens of several rows, C tokens per chunk, H hidden width, V vocabulary, K kept tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..schemas.capture import LOGITS, Capture
from .dense import TOP_K, Distribution, Logits, TopK

_SCALES = ("logit_scale", "output_multiplier", "lm_head_multiplier")


def scaled(logits_TV: Any, config: Any) -> Any:
    """Apply a model's logit multiplier and soft cap, if any; `config` is the text model's config."""
    import torch

    scale = multiplier(config)
    if scale is not None:
        logits_TV = logits_TV * scale
    cap = getattr(config, "final_logit_softcapping", None)
    return logits_TV if cap is None else torch.tanh(logits_TV / cap) * cap


def multiplier(config: Any) -> float | None:
    """Return the factor by which a model multiplies its logits; None if it does not."""
    scale = next((value for name in _SCALES if (value := getattr(config, name, None)) is not None), None)
    divisor = getattr(config, "logits_scaling", None)
    if scale is None and divisor is not None:
        scale = divisor if config.model_type == "hyperclovax" else 1 / divisor
    return scale


def top_k_with_tail(logits_TV: Any, k: int, temperature: float) -> tuple[Any, Any, Any]:
    """Return the K most probable tokens in each row, their logprobs, and the log of the total probability of all
    others.

    Returns ids [T, K] int32, logprobs [T, K] float32 and tail [T] float32, nats; the tail is -inf if K is the whole
    vocabulary. Computed in float32, or float64 if the logits are.
    """
    import torch

    k = min(k, logits_TV.shape[-1])
    wide_TV = logits_TV if logits_TV.dtype == torch.float64 else logits_TV.float()
    logprobs_TV = torch.log_softmax(wide_TV / temperature, dim=-1)
    top = logprobs_TV.topk(k, dim=-1)
    rest_TV = logprobs_TV.scatter(-1, top.indices, float("-inf"))
    return top.indices.to(torch.int32), top.values.float(), torch.logsumexp(rest_TV, dim=-1).float()


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
        if capture.level == LOGITS:
            return Logits(logits=kept.arrays[0])
        return TopK(**dict(zip(TOP_K, kept.arrays, strict=True)))


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
