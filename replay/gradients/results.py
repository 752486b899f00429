"""What a gradient's replay found, and the figures that follow from its sums."""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal

from ...schemas.loss import Loss
from ...schemas.results import Result


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleGradient:
    """An arm's gradient a next to the reference r, the gradient as recorded, in the whole model or a kind of module.

    Micro-batches i of n give shares whose mean, times n, are a and r: n a_i is what that micro-batch alone estimates.
    """

    module: str
    """`all`, embedding, attention, mlp, norm, head or other."""
    num_parameters: int
    norm: float
    """|a|"""
    cosine: float | None
    """<a, r> / (|a| |r|); None where one is 0."""
    norm_ratio: float | None
    """|a| / |r|; None where r is 0."""
    bias: float
    """|mean over micro-batches of n a_i - n r_i| = |a - r|."""
    bias_error: float | None
    """Standard error of that mean over micro-batches, as a length, to about 2 %: a bias below it cannot be told from
    none. None without micro-batches."""
    variance: float | None
    """Of a, as a mean over micro-batches: sum |n a_i - a|^2 / (n (n - 1)). None without micro-batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedProgress:
    """The three terms of the least expected progress of a plain gradient step, E[J'] - J >= A + B + C.

    arXiv 2602.01826, eq. 13, with J the negative of the loss, eta the learning rate, L the smoothness of J: A = eta (1 - L
    eta / 2) |r|^2, B = eta (1 - L eta) <r, bias>, C = -(L eta^2 / 2) (variance + |bias|^2). The gradient r is this batch's
    own, noise included.
    """

    learning_rate: float
    smoothness: float | None
    """L; None where it was not given: then A and B are those of L = 0, and C is per unit of L."""
    a: float
    b: float
    c: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientStep:
    """The gradient of one optimizer step under one arm, before clipping."""

    step: int
    policy_version: int
    """Of the weights that it is taken at."""
    arm: str
    num_sequences: int
    num_tokens: int
    """That count in the loss."""
    grad_norm: float
    """As torch's clip_grad_norm_ finds it."""
    logged_norm: float | None
    """What the trainer logged; None where it did not, or where which step's it is cannot be told."""
    reproduced: bool | None
    """Of the gradient as recorded: whether the norm is the logged one, to the last digit that was logged. None where no
    norm was logged."""
    forward_held: bool
    """Of the gradient as recorded: whether its forward gave the recorded logprobs, to the bit."""
    num_micro_batches: int
    """That bias and variance are over; 0 for none."""
    whole: ModuleGradient
    modules: tuple[ModuleGradient, ...]
    signal: float | None
    """|G|^2 without the noise of the batch (McCandlish et al. 2018, arXiv 1812.06162, appendix A.1): (B |G_B|^2 - b
    |G_b|^2) / (B - b), with B sequences of the step and b of a micro-batch. It may come out below 0 where noise hides it."""
    noise: float | None
    """The trace of a single sequence's gradient covariance, by the same source: (|G_b|^2 - |G_B|^2) / (1 / b - 1 / B)."""
    noise_scale: float | None
    """noise / signal, in sequences: where it is far above the step's, a gradient is mostly noise. None where the signal
    is not above 0."""
    progress: ExpectedProgress | None
    """None without a recorded learning rate or without micro-batches."""
    notes: tuple[str, ...] = ()
    """Why the logged norm did not come back, as far as known, and what else to know of this step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientReport(Result):
    """Gradients of a run's steps under each arm; the first arm is the recording."""

    _text = "tim_trace.analysis.gradient_text:gradient_text"

    run: str
    loss: Loss
    steps: tuple[GradientStep, ...]
    notes: tuple[str, ...] = ()
    """What holds of the whole run: steps that have no answer, with the reason."""


def same_digits(found: float, logged: float) -> bool:
    """Whether a norm is the logged one to the last digit that was logged.

    >>> same_digits(0.60575318, 0.606), same_digits(0.60575318, 0.605)
    (True, False)
    """
    if not math.isfinite(logged) or not math.isfinite(found):
        return repr(found) == repr(logged)
    digits = len(Decimal(repr(logged)).normalize().as_tuple().digits)
    return float(f"{found:.{digits}g}") == logged
