"""Exact products and sums that do not depend on summation order.

A vector is cut into slices with a few bits each, stored as integers in float64. Products of slices and all partial sums
stay within 2**53, so a BLAS can add the products in any order and get the same bits (Ozaki, Ogita, Oishi and Rump,
Numer. Algorithms 59, 2012). Each vector has its own power-of-two scale, so a token's result does not depend on its
neighbours in the batch.

Shapes: M rows on the left, N rows on the right, K elements per row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .functions import power_of_two

_LARGEST = 500
"""Largest scale exponent for which float64 products cannot overflow. All float32 numbers have smaller exponents."""
_UNIT_BITS = 33
UNITS = 1 << (53 - _UNIT_BITS)
"""Maximum number of values that `sum_of_units` can add exactly."""


@dataclass(frozen=True, slots=True)
class Slices:
    """Vectors along the last axis: truncated sums 2**(exponent - bits) (parts[0] + 2**-bits parts[1] + ...)."""

    parts: tuple[Any, ...]
    """Integers stored as float64, with magnitudes up to 2**bits in the first tensor and 2**(bits - 1) in the others."""
    exponent: Any
    """int64 exponent of each vector. Every element is below 2**exponent in magnitude."""
    bits: int

    def part(self, seen: slice) -> Slices:
        return Slices(tuple(part[:, :, seen] for part in self.parts), self.exponent[:, :, seen], self.bits)


def bits_for(length: int, count: int) -> int:
    """Return the largest number of bits per slice for which a sum of `length` slice products is exact."""
    # Sums of first-slice products require 2 * bits + log2(length) <= 53. With three slices, sums of later slice
    # products can be a quarter larger, so reserve one more bit.
    return int(53 - (length - 1).bit_length() - (count > 2)) // 2


def sliced(x: Any, bits: int, count: int) -> Slices:
    """Cut vectors into `count` slices. The error is at most 2**-(count * bits) relative to a vector's largest element.
    If a vector contains a NaN or an infinity, all its elements become NaN."""
    exponent, finite = exponents(x)
    rest = x * power_of_two(bits - exponent).masked_fill_(~finite, float("nan"))
    parts = []
    for index in range(count):
        parts.append(rest.round())
        if index + 1 < count:
            rest.sub_(parts[-1]).mul_(2.0**bits)
    return Slices(tuple(parts), exponent, bits)


def exponents(x: Any) -> tuple[Any, Any]:
    """Return an exponent that bounds each vector along the last axis, and whether the vector is finite."""
    least, most = x.aminmax(dim=-1, keepdim=True)
    exponent = ((torch.maximum(most, -least).view(torch.int64) >> 52) & 0x7FF) - 1022
    return exponent.clamp(-_LARGEST, _LARGEST), exponent <= _LARGEST


def matmul(left: Slices, right: Slices) -> Any:
    """Return left @ right.T in float64 for `left` [..., M, K] and `right` [..., N, K].

    With `count` slices of b bits each, the products of slices i and j with i + j >= `count` are left out. The absolute
    error is at most 6 K 2**(-count b) max|left row| max|right row|, plus a relative error of 2**-52.
    """
    total = _total(left, right, lambda a, b: a @ b.mT)
    total.mul_(power_of_two(left.exponent - left.bits))
    return total.mul_(power_of_two(right.exponent - right.bits).mT)


def scaled_matmul(left: Slices, right: Slices) -> Any:
    """Like `matmul`, but `left` is already multiplied by the scales of `right`, whose parts have shape [..., K, N]."""
    return _total(left, right, lambda a, b: a @ b).mul_(power_of_two(left.exponent - left.bits - right.bits))


def sum_of_squares(x: Any, count: int) -> Any:
    """Return the sum of squares along the last axis, [..., 1] in float64, with the same error bound as `matmul`."""
    slices = sliced(x, bits_for(x.shape[-1], count), count)
    total = _total(slices, slices, lambda a, b: (a * b).sum(dim=-1, keepdim=True))
    return total.mul_(power_of_two(2 * (slices.exponent - slices.bits)))


def sum_of_units(x: Any) -> Any:
    """Round values in [0, 1] to multiples of 2**-66, and return their sum along the last axis (at most UNITS values)."""
    assert x.shape[-1] <= UNITS
    high = x * 2.0**_UNIT_BITS
    whole = high.round()
    low = high.sub_(whole).mul_(2.0**_UNIT_BITS).round_()
    sums = [torch.sum(part, dim=-1, keepdim=True) for part in (whole, low)]
    return sums[0] * 2.0**-_UNIT_BITS + sums[1] * 2.0 ** (-2 * _UNIT_BITS)


def _total(left: Slices, right: Slices, contract: Any) -> Any:
    """Return the sum of all slice products. Products of the same order (the sum of the two slice indices) are added
    exactly. These partial sums are then added, smallest first, which is the only step that rounds."""
    assert left.bits == right.bits
    total = None
    for order in reversed(range(len(left.parts))):
        same_order = contract(left.parts[0], right.parts[order])
        for index in range(1, order + 1):
            same_order += contract(left.parts[index], right.parts[order - index])
        total = same_order if total is None else total.mul_(2.0**-left.bits).add_(same_order)
    assert total is not None
    # An exact zero's sign depends on summation order. Adding 0.0 makes it +0.
    return total.add_(0.0)
