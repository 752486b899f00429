"""Squared norms and sketches of gradients, and products of two gradients.

A sketch reduces a gradient to K numbers, from which the norm of a sum or difference of gradients can be estimated: each
element is added to one of K buckets with a random sign. The sum of squared buckets is an unbiased estimate of the
squared norm (Charikar, Chen and Farach-Colton 2002; relative standard deviation at most sqrt(2 / K) unless a few
elements dominate), and sketches are linear.

Shapes: M kinds of modules, K buckets per sketch, n elements in a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...schemas.modules import KINDS, kind_of

NUM_BUCKETS = 4096
"""K: number of buckets in a sketch."""
_PIECE = 1 << 24
"""Number of tensor elements processed at a time; a multiple of K."""

Gradient = Sequence[Any]
"""A gradient: one tensor per parameter, or None for a parameter without a gradient."""


@dataclass(frozen=True, slots=True)
class Part:
    """Summary of one micro-batch's share of a gradient. The shares of all micro-batches add up to the gradient."""

    squares: np.ndarray
    """[M] squared norms by kind of module."""
    sketches: np.ndarray
    """[M, K] sketches by kind of module."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Inner products of an arm's gradient a and the reference r, by kind of module: [M] each."""

    aa: np.ndarray
    ar: np.ndarray
    rr: np.ndarray
    dd: np.ndarray
    """Squared norms of the difference a - r."""


class Sketcher:
    """Computation of sketches for the tensors of one model, with the same random signs in every run."""

    def __init__(self) -> None:
        self._signs: dict[str, Any] = {}

    def sketch(self, name: str, values: Any) -> Any:
        """Return the sketch [K] of a tensor, float64 on the CPU."""
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
        """Return the random signs [n] int8 for a tensor's elements."""
        import torch

        if name not in self._signs:
            draw = torch.Generator().manual_seed(len(self._signs))
            signs = torch.randint(0, 2, (values.numel(),), dtype=torch.int8, generator=draw)
            self._signs[name] = (signs * 2 - 1).to(values.device)
        return self._signs[name]


class Sums:
    """Computation of squared norms, sketches and inner products for one model's gradients."""

    def __init__(self, names: Sequence[str], sizes: Sequence[int]):
        self.names = list(names)
        self._kinds = [KINDS.index(kind_of(name)) for name in names]
        self.num_parameters = np.bincount(self._kinds, sizes, len(KINDS)).astype(np.int64)
        """[M] number of parameters by kind of module."""
        self._sketcher = Sketcher()

    def part(self, gradient: Gradient) -> Part:
        """Return the summary of a micro-batch's share of the gradient."""
        sketches = np.zeros((len(KINDS), NUM_BUCKETS))
        squares = np.zeros(len(KINDS))
        for name, kind, values in zip(self.names, self._kinds, gradient, strict=True):
            if values is not None:
                squares[kind] += _norm(values) ** 2
                sketches[kind] += self._sketcher.sketch(name, values).numpy()
        return Part(squares, sketches)

    def pair(self, arm: Gradient, reference: Gradient) -> Pair:
        """Return the inner products of an arm's gradient and the reference, summed in float64."""
        sums = np.zeros((4, len(KINDS)))
        for kind, a, r in zip(self._kinds, arm, reference, strict=True):
            if a is not None or r is not None:
                sums[:, kind] += _products(a, r)
        return Pair(*sums)


def add(total: list[Any] | None, gradient: list[Any]) -> list[Any]:
    """Add a gradient to the total in place, in the way torch accumulates gradients, and return the total."""
    import torch

    if total is None:
        return gradient
    both = [(one, other) for one, other in zip(total, gradient, strict=True) if one is not None and other is not None]
    if both:
        torch._foreach_add_([one for one, _ in both], [other for _, other in both])
    return [other if one is None else one for one, other in zip(total, gradient, strict=True)]


def total_norm(gradient: Gradient) -> float:
    """Return the norm that torch.nn.utils.clip_grad_norm_ computes, bit for bit."""
    import torch

    return float(torch.nn.utils.get_total_norm([values for values in gradient if values is not None]))


def _norm(values: Any) -> float:
    import torch

    return float(torch.linalg.vector_norm(values, dtype=torch.float64))


def _products(a: Any, r: Any) -> np.ndarray:
    """Return the sums [4] of aa, ar, rr and (a - r)^2."""
    import torch

    a = torch.zeros_like(r) if a is None else a.to(r.device if r is not None else a.device)
    r = torch.zeros_like(a) if r is None else r
    sums = torch.zeros(4, dtype=torch.float64)
    for one, other in zip(a.reshape(-1).split(_PIECE), r.reshape(-1).split(_PIECE), strict=True):
        one, other = one.double(), other.double()
        off = one - other
        sums += torch.stack([one @ one, one @ other, other @ other, off @ off]).cpu()
    return np.asarray(sums.numpy())
