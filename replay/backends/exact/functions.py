"""Rounding, exp, log, sine and cosine, built from correctly rounded float64 operations.

torch's own functions may round a tensor's last elements differently from the rest, and give different results on CPU
and GPU. Basic IEEE 754 operations give the same bits everywhere. Each step is a separate torch operation, because a
fused operation may skip a rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

_LOG2_E = float.fromhex("0x1.71547652b82fep+0")
# ln 2 and pi / 2, each as a tuple of numbers that add up to it. The first number has 33 bits, so its product with an
# integer below 2**20 is exact (Cody and Waite, Software Manual for the Elementary Functions, 1980).
_LN2 = (float.fromhex("0x1.62e42feep-1"), float.fromhex("0x1.a39ef35793c76p-33"))
_HALF_PI = (float.fromhex("0x1.921fb544p+0"), float.fromhex("0x1.0b4611a6p-34"), float.fromhex("0x1.3198a2e037073p-69"))
_LEAST, _MOST = -708.0, 709.0
"""Range of x in which e**x is a normal float64 number."""
_EXP = tuple(1 / math.factorial(order) for order in range(14))
_SINE = tuple((-1) ** order / math.factorial(2 * order + 1) for order in range(9))
_COSINE = tuple((-1) ** order / math.factorial(2 * order) for order in range(10))
_ATANH = tuple(1 / (2 * order + 1) for order in range(12))


def exp(x: Any) -> Any:
    """Return e**x in float64 (relative error around 1e-16), but 0 for x < -708 and e**709 for x > 709."""
    inside = x.clamp(_LEAST, _MOST)
    turns = (inside * _LOG2_E).round_()
    rest = inside.sub_(turns * _LN2[0]).sub_(turns * _LN2[1])
    return polynomial(rest, _EXP).mul_(power_of_two(turns.to(torch.int64))).masked_fill_(x < _LEAST, 0.0)


def log(x: Any) -> Any:
    """Return the natural logarithm for positive normal float64 numbers (relative error around 2e-16)."""
    # With x = m 2**k and m near 1, ln x = k ln 2 + 2 atanh((m - 1) / (m + 1)).
    exponent = (x.view(torch.int64) >> 52) - 1023
    mantissa = x * power_of_two(-exponent)
    upper = mantissa > math.sqrt(2)
    exponent, mantissa = exponent + upper, torch.where(upper, mantissa * 0.5, mantissa)
    ratio = (mantissa - 1) / (mantissa + 1)
    turns = exponent.to(torch.float64)
    return turns * _LN2[0] + (turns * _LN2[1] + polynomial(ratio * ratio, _ATANH) * (ratio * 2))


def cosine_and_sine(x: Any) -> tuple[Any, Any]:
    """Return cosine and sine for float64 angles from 0 to a million radians (error around 2e-16)."""
    turns = (x * (2 / math.pi)).round_()
    rest = x - turns * _HALF_PI[0]
    for part in _HALF_PI[1:]:
        rest = rest - turns * part
    square = rest * rest
    sine, cosine = polynomial(square, _SINE) * rest, polynomial(square, _COSINE)
    quarter = turns.to(torch.int64) & 3
    odd = (quarter & 1).bool()
    shifted_cosine, shifted_sine = torch.where(odd, sine, cosine), torch.where(odd, cosine, sine)
    return (
        torch.where((quarter == 1) | (quarter == 2), -shifted_cosine, shifted_cosine),
        torch.where(quarter >= 2, -shifted_sine, shifted_sine),
    )


def silu(x: Any) -> Any:
    return x / exp(-x).add_(1.0)


def polynomial(x: Any, coefficients: tuple[float, ...]) -> Any:
    result = torch.full_like(x, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        result.mul_(x).add_(coefficient)
    return result


def power_of_two(exponent: Any) -> Any:
    """Return 2**exponent in float64 for int64 exponents from -1022 to 1023."""
    return ((exponent + 1023) << 52).view(torch.float64)


def divided(x: Any, number: float) -> Any:
    """Return x / number, rounded once. On a GPU, torch would multiply by the reciprocal of a Python number."""
    return x / torch.full((1,), number, dtype=x.dtype, device=x.device)


@dataclass(frozen=True, slots=True)
class Precision:
    """Rounds numbers in float64 tensors to `dtype` wherever the transformers model would round."""

    dtype: Any

    @property
    def slices(self) -> int:
        """Number of slices (see slices.py) that represent a vector. Two slices preserve at least 36 bits, and three at
        least 51, relative to the vector's largest element."""
        return 3 if self.dtype == torch.float64 else 2

    def round(self, x: Any) -> Any:
        return rounded(x, self.dtype)

    def wide(self, x: Any) -> Any:
        """Round to transformers' dtype for norms, routing and logits: float32, or float64 for a float64 model."""
        return rounded(x, torch.float64 if self.dtype == torch.float64 else torch.float32)


def rounded(x: Any, dtype: Any) -> Any:
    """Round a float64 tensor to float32 first and then to `dtype`, so that CPU and GPU round the same way."""
    if dtype == torch.float64:
        return x
    single = x.to(torch.float32)
    return (single if dtype == torch.float32 else single.to(dtype)).to(torch.float64)
