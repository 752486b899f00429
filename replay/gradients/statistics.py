"""From sums over gradients to the figures of a step.

Shapes: n micro-batches, M kinds of modules, K buckets of a sketch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ...schemas.modules import KINDS
from .results import ExpectedProgress, ModuleGradient
from .sums import Pair, Part, Sums

ALL = "all"


def modules(sums: Sums, pair: Pair, parts: Sequence[Part], reference: Sequence[Part]) -> tuple[ModuleGradient, ...]:
    """The whole model's figures, and then those of each kind of module that it has."""
    variances = _variances(pair.aa, parts)
    errors = _bias_errors(parts, reference)
    chosen = [(ALL, np.ones(len(KINDS), bool))]
    chosen += [(kind, np.arange(len(KINDS)) == i) for i, kind in enumerate(KINDS) if sums.num_parameters[i]]
    return tuple(
        _module(name, int(sums.num_parameters[mask].sum()), pair, variances, errors, mask) for name, mask in chosen
    )


def _module(
    name: str, size: int, pair: Pair, variances_M: np.ndarray | None, errors_M: np.ndarray | None, mask: np.ndarray
) -> ModuleGradient:
    aa, ar, rr, dd = (float(values[mask].sum()) for values in (pair.aa, pair.ar, pair.rr, pair.dd))
    return ModuleGradient(
        module=name,
        num_parameters=size,
        norm=math.sqrt(aa),
        cosine=ar / math.sqrt(aa * rr) if aa and rr else None,
        norm_ratio=math.sqrt(aa / rr) if rr else None,
        bias=math.sqrt(dd),
        bias_error=None if errors_M is None else math.sqrt(float(errors_M[mask].sum())),
        variance=None if variances_M is None else float(variances_M[mask].sum()),
    )


def _variances(aa_M: np.ndarray, parts: Sequence[Part]) -> np.ndarray | None:
    """[M] sum over micro-batches of |n a_i - a|^2 / (n (n - 1)) = (n sum |a_i|^2 - |a|^2) / (n - 1)."""
    n = len(parts)
    if n < 2:
        return None
    squares_M = np.sum([part.squares for part in parts], axis=0)
    return np.asarray(np.maximum(n * squares_M - aa_M, 0.0) / (n - 1))


def _bias_errors(parts: Sequence[Part], reference: Sequence[Part]) -> np.ndarray | None:
    """[M] squared standard errors of the bias: the same of a_i - r_i, by their sketches."""
    n = len(parts)
    if n < 2:
        return None
    off_nMK = np.stack([part.sketches for part in parts]) - np.stack([part.sketches for part in reference])
    off_MK = off_nMK.sum(0)
    return np.asarray(((n * off_nMK - off_MK) ** 2).sum((0, 2)) / (n * (n - 1)))


def noise(aa: float, parts: Sequence[Part]) -> tuple[float | None, float | None, float | None]:
    """Signal, noise and noise scale (McCandlish et al. 2018, appendix A.1), of micro-batches' sequences and the step's."""
    n = len(parts)
    if n < 2:
        return None, None, None
    large = sum(part.num_sequences for part in parts)
    small = large / n
    of_small = n * float(np.sum([part.squares for part in parts]))
    signal = (large * aa - small * of_small) / (large - small)
    spread = (of_small - aa) / (1 / small - 1 / large)
    return signal, spread, spread / signal if signal > 0 else None


def expected_progress(
    whole: ModuleGradient, pair: Pair, learning_rate: float | None, smoothness: float | None
) -> ExpectedProgress | None:
    """The terms of arXiv 2602.01826, eq. 13; None where the learning rate or the variance is not known."""
    if learning_rate is None or whole.variance is None:
        return None
    eta, size = learning_rate, smoothness or 0.0
    rr, ar, dd = float(pair.rr.sum()), float(pair.ar.sum()), float(pair.dd.sum())
    unit = -(eta**2) / 2 * (whole.variance + dd)
    return ExpectedProgress(
        learning_rate=eta,
        smoothness=smoothness,
        a=eta * (1 - size * eta / 2) * rr,
        b=eta * (1 - size * eta) * (ar - rr),
        c=unit if smoothness is None else unit * size,
    )
