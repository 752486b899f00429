"""A gradient in a few thousand numbers, from which the length of a sum or a difference of gradients can be told.

Each element is added to one of K buckets with a random sign. Then the sum of a vector's squared buckets is an unbiased
estimate of its squared length (Charikar, Chen and Farach-Colton 2002; relative standard deviation sqrt(2 / K) at most where
no few elements carry the length), and sketches add up as the vectors do.

Shapes: K buckets, n elements of a tensor.
"""

from __future__ import annotations

from typing import Any

NUM_BUCKETS = 4096
"""K"""
_PIECE = 1 << 24
"""Elements that are worked on at a time, a multiple of K."""


class Sketcher:
    """Sketches tensors of one model; the signs are the same in every run."""

    def __init__(self) -> None:
        self._signs: dict[str, Any] = {}

    def sketch(self, name: str, values: Any) -> Any:
        """[K] float64 on the CPU."""
        import torch

        flat, signs = values.reshape(-1), self._signs_of(name, values)
        buckets = torch.zeros(NUM_BUCKETS, dtype=torch.float64, device=values.device)
        for start in range(0, flat.numel(), _PIECE):
            piece = flat[start : start + _PIECE] * signs[start : start + _PIECE]
            whole = piece.numel() // NUM_BUCKETS * NUM_BUCKETS
            buckets += piece[:whole].view(-1, NUM_BUCKETS).sum(0, dtype=torch.float64)
            buckets[: piece.numel() - whole] += piece[whole:].double()
        return buckets.cpu()

    def _signs_of(self, name: str, values: Any) -> Any:
        """[n] int8"""
        import torch

        if name not in self._signs:
            draw = torch.Generator().manual_seed(len(self._signs))
            signs = torch.randint(0, 2, (values.numel(),), dtype=torch.int8, generator=draw)
            self._signs[name] = (signs * 2 - 1).to(values.device)
        return self._signs[name]
