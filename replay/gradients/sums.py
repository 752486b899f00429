"""Squared norms of gradients, and products of two gradients.

Shapes: M kinds of modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...schemas.modules import KINDS, kind_of

_PIECE = 1 << 24
"""Number of tensor elements processed at a time."""

Gradient = Sequence[Any]
"""A gradient: one tensor per parameter, or None for a parameter without a gradient."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Inner products of an arm's gradient a and the reference r, by kind of module: [M] each."""

    aa: np.ndarray
    ar: np.ndarray
    rr: np.ndarray
    dd: np.ndarray
    """Squared norms of the difference a - r."""


class Sums:
    """Computation of squared norms and inner products for one model's gradients."""

    def __init__(self, names: Sequence[str], sizes: Sequence[int]):
        self._kinds = [KINDS.index(kind_of(name)) for name in names]
        self.num_parameters = np.bincount(self._kinds, sizes, len(KINDS)).astype(np.int64)
        """[M] number of parameters by kind of module."""

    def squares(self, gradient: Gradient) -> np.ndarray:
        """Return the squared norms [M] of a gradient, by kind of module."""
        squares = np.zeros(len(KINDS))
        for kind, values in zip(self._kinds, gradient, strict=True):
            if values is not None:
                squares[kind] += _norm(values) ** 2
        return squares

    def pair(self, arm: Gradient, reference: Gradient) -> Pair:
        """Return the inner products of an arm's gradient and the reference, summed in float64."""
        sums = np.zeros((4, len(KINDS)))
        for kind, a, r in zip(self._kinds, arm, reference, strict=True):
            if a is not None or r is not None:
                sums[:, kind] += _products(a, r)
        return Pair(*sums)


def add(total: list[Any] | None, gradient: list[Any]) -> list[Any]:
    """Add a gradient to the total in place, in the way torch accumulates gradients, and return the total."""
    if total is None:
        return gradient
    both = [(one, other) for one, other in zip(total, gradient, strict=True) if one is not None and other is not None]
    if both:
        torch._foreach_add_([one for one, _ in both], [other for _, other in both])
    return [other if one is None else one for one, other in zip(total, gradient, strict=True)]


def total_norm(gradient: Gradient) -> float:
    """Return the norm that torch.nn.utils.clip_grad_norm_ computes, bit for bit."""
    return float(torch.nn.utils.get_total_norm([values for values in gradient if values is not None]))


def _norm(values: Any) -> float:
    return float(torch.linalg.vector_norm(values, dtype=torch.float64))


def _products(a: Any, r: Any) -> np.ndarray:
    """Return the sums [4] of aa, ar, rr and (a - r)^2."""
    a = torch.zeros_like(r) if a is None else a.to(r.device if r is not None else a.device)
    r = torch.zeros_like(a) if r is None else r
    sums = torch.zeros(4, dtype=torch.float64)
    for one, other in zip(a.reshape(-1).split(_PIECE), r.reshape(-1).split(_PIECE), strict=True):
        one, other = one.double(), other.double()
        off = one - other
        sums += torch.stack([one @ one, one @ other, other @ other, off @ off]).cpu()
    return np.asarray(sums.numpy())
