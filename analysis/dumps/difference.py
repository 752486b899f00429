"""Token-by-token difference between two tensors of the same shape."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_AT_ONCE = 1 << 20
"""Maximum number of elements converted to float64 at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpDifference:
    """Difference between two floating-point tensors. Errors are relative to the RMS of both tensors."""

    rms: float
    """RMS of the difference over the whole tensor, relative to the RMS of both tensors."""
    worst: float
    """Largest error of a single token, relative to the RMS of that token or of the median token, whichever is larger."""
    token: int
    """Index of the token with the largest error."""
    max_abs: float
    num_nonfinite_a: int
    """Number of NaN and infinite values in a without a NaN or infinite value in the same place in b."""
    num_nonfinite_b: int


def difference(a: np.ndarray, b: np.ndarray) -> DumpDifference:
    """Compare a with b, both [T, ...] of the same shape."""
    a, b = (array.reshape(len(array) if array.ndim else 1, -1) for array in (a, b))
    error_T, size_T = np.zeros(len(a)), np.zeros(len(a))
    max_abs, odd_a, odd_b = 0.0, 0, 0
    step = max(_AT_ONCE // max(a.shape[1], 1), 1)
    for start in range(0, len(a), step):
        rows = slice(start, start + step)
        a_TF, b_TF = a[rows].astype(np.float64), b[rows].astype(np.float64)
        is_a, is_b = np.isfinite(a_TF), np.isfinite(b_TF)
        same = ~is_a & ~is_b & (a_TF == b_TF)
        odd_a, odd_b = odd_a + int((~is_a & ~same).sum()), odd_b + int((~is_b & ~same).sum())
        both = is_a & is_b
        a_TF, b_TF = np.where(both, a_TF, 0), np.where(both, b_TF, 0)
        d_TF = a_TF - b_TF
        error_T[rows] = (d_TF**2).sum(1)
        size_T[rows] = ((a_TF**2).sum(1) + (b_TF**2).sum(1)) / 2
        max_abs = max(max_abs, float(np.abs(d_TF).max(initial=0)))
    whole = size_T.sum()
    floor = np.median(size_T) if len(size_T) else 0.0
    relative_T = np.sqrt(np.divide(error_T, np.maximum(size_T, floor), out=np.zeros_like(error_T), where=error_T > 0))
    token = int(relative_T.argmax()) if len(relative_T) else 0
    return DumpDifference(
        rms=float(np.sqrt(error_T.sum() / whole)) if whole else 0.0, worst=float(relative_T[token]) if len(a) else 0.0,
        token=token, max_abs=max_abs, num_nonfinite_a=odd_a, num_nonfinite_b=odd_b,
    )  # fmt: skip
