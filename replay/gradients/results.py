from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal

from ...schemas.loss import Loss
from ...schemas.results import Result


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleGradient:
    """An arm's gradient a compared with the recorded gradient r, for the whole model or one kind of module.

    a and r are sums of the shares a_i and r_i of n micro-batches; n a_i estimates a from micro-batch i alone.
    """

    module: str
    """`all`, `embedding`, `attention`, `mlp`, `norm`, `head` or `other`."""
    num_parameters: int
    norm: float
    """|a|"""
    cosine: float | None
    """<a, r> / (|a| |r|); None if either is 0."""
    norm_ratio: float | None
    """|a| / |r|; None if r is 0."""
    bias: float
    """|mean over micro-batches of n a_i - n r_i| = |a - r|."""
    variance: float | None
    """Variance of a as a mean over micro-batches: sum |n a_i - a|^2 / (n (n - 1)). None without micro-batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientStep:
    """The gradient of one optimizer step in one arm, before clipping."""

    step: int
    policy_version: int
    """Policy version of the weights at which the gradient is taken."""
    arm: str
    num_sequences: int
    num_tokens: int
    """Number of tokens included in the loss."""
    grad_norm: float
    """Norm of the whole gradient, as computed by torch's clip_grad_norm_."""
    logged_norm: float | None
    """Norm logged by the trainer; None if none was logged, or if it is unclear which one belongs to this update."""
    reproduced: bool | None
    """For the recorded gradient: true if it equals the logged norm to the last digit; None without a logged norm."""
    forward_held: bool
    """For the recorded gradient: true if the forward pass reproduced the recorded logprobs bit for bit."""
    num_micro_batches: int
    """Number of micro-batches from which the variance is computed; 0 if there are too few."""
    whole: ModuleGradient
    modules: tuple[ModuleGradient, ...]
    notes: tuple[str, ...] = ()
    """Why the logged norm was not reproduced, if known, and other remarks on the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientReport(Result):
    """Gradients of a run's steps in each arm. The first arm is the recording."""

    _text = "tim_trace.analysis.replay_text:gradient_text"

    run: str
    loss: Loss
    steps: tuple[GradientStep, ...]
    notes: tuple[str, ...] = ()
    """Remarks on the whole run, including each step without a result and the reason."""


def same_digits(found: float, logged: float) -> bool:
    """Return True if a norm equals the logged norm to the last logged digit.

    >>> same_digits(0.60575318, 0.606), same_digits(0.60575318, 0.605)
    (True, False)
    """
    if not math.isfinite(logged) or not math.isfinite(found):
        return repr(found) == repr(logged)
    digits = len(Decimal(repr(logged)).normalize().as_tuple().digits)
    return float(f"{found:.{digits}g}") == logged
