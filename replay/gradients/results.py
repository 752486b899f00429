from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal

from ...schemas.loss import Loss
from ...schemas.results import Result


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleGradient:
    """Compares an arm's gradient a with the recorded gradient r, for the whole model or one kind of module.

    a and r are sums over n micro-batches: a = sum(a_i), r = sum(r_i). Each micro-batch alone estimates a as n a_i.
    """

    module: str
    """`all`, `embedding`, `attention`, `mlp`, `norm`, `head` or `other`."""
    num_parameters: int
    norm: float
    """|a|"""
    cosine: float | None
    """<a, r> / (|a| |r|), or None if either norm is 0."""
    norm_ratio: float | None
    """|a| / |r|, or None if r is 0."""
    bias: float
    """|a - r|, which equals |mean(n a_i - n r_i)| over micro-batches."""
    variance: float | None
    """Variance across micro-batches: sum |n a_i - a|^2 / (n (n - 1)). None if there are too few micro-batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientStep:
    """One optimizer step's gradient in one arm, before clipping."""

    step: int
    policy_version: int
    arm: str
    num_sequences: int
    num_tokens: int
    grad_norm: float
    """Total norm as computed by torch's clip_grad_norm_."""
    logged_norm: float | None
    """Norm logged by the trainer, or None if it is missing or cannot be matched to this update."""
    reproduced: bool | None
    """True if the recorded arm's norm equals the logged norm to the last logged digit. None for other arms, or if no
    norm was logged."""
    forward_held: bool
    """True if this arm's forward passes reproduced the recorded logprobs bit for bit."""
    num_micro_batches: int
    """Number of micro-batches used for the variance, or 0 if there are too few."""
    whole: ModuleGradient
    modules: tuple[ModuleGradient, ...]
    notes: tuple[str, ...] = ()
    """Remarks, including why the logged norm was not reproduced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientReport(Result):
    """Gradients for each step and arm. The recorded gradient comes first."""

    _text = "tim_trace.analysis.replay_text:gradient_text"

    run: str
    loss: Loss
    steps: tuple[GradientStep, ...]
    notes: tuple[str, ...] = ()
    """Remarks on the whole run, including why some steps have no result."""


def same_digits(found: float, logged: float) -> bool:
    """Return True if a norm, rounded to as many digits as were logged, equals the logged norm.

    >>> same_digits(0.60575318, 0.606), same_digits(0.60575318, 0.605)
    (True, False)
    """
    if not math.isfinite(logged) or not math.isfinite(found):
        return repr(found) == repr(logged)
    digits = len(Decimal(repr(logged)).normalize().as_tuple().digits)
    return float(f"{found:.{digits}g}") == logged
