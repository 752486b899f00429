"""What was found where the gradients of two executions part."""

from __future__ import annotations

from dataclasses import dataclass

INPUT, PARAMETER, DETACHED, BETWEEN = "input", "parameter", "detached", "between"
"""What of an operator's backward is wrong: what it passed on, a parameter's gradient, nothing passed on at all; or what came
back to it from the operators behind it (residual stream, rotary, product of gate and up, head, loss)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardError:
    """What the backward of one operator of one execution introduced, over all its forwards, against float64 on the same numbers."""

    side: str
    """`a` or `b`."""
    order: int
    """Its place on the way back, from 0."""
    operator: str
    """Its module's name; `<operator>.output` for what lies between it and the next ones, `<layer>.residual` for the stream."""
    kind: str
    layer: int | None
    """From 0; None outside of layers."""
    what: str
    """`input`, `parameter`, `detached` or `between`, of the largest ratio."""
    dtype: str
    """Of the gradient, torch's name; empty where there is none."""
    introduced: float
    """Largest over forwards of the length of its own error, relative to that of the exact gradient."""
    ratio: float
    """Its largest own error, in units of the bound of what rounding can do; beyond 1 it computes something else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterDifference:
    """One parameter's gradient in both executions; a tied one stands under its first name."""

    parameter: str
    kind: str
    """Of its operator."""
    layer: int | None
    norm_a: float
    norm_b: float
    difference: float | None
    """|a - b| / |a|, in lengths; None where a is 0."""
    cosine: float | None
    """Of a and b; None where one is 0."""
    share: float
    """Of |a - b|^2 of the whole gradient; these add up to 1 where the gradients differ, 0 where they do not."""
    introduced_a: float | None
    """Length of what its operators' backward introduced in a, relative to that of the exact gradient on the same numbers; None
    where that is 0."""
    introduced_b: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LocatedBackward:
    """Where the gradients of two executions part, of some sequences' share of a recorded step's loss."""

    run: str
    step: int
    policy_version: int
    a: str
    b: str
    chosen: str
    """How sequences were chosen."""
    num_sequences: int
    num_tokens: int
    """That count in the loss."""
    norm_a: float
    norm_b: float
    difference: float | None
    """|a - b| / |a| of the whole gradient; None where a is 0."""
    cosine: float | None
    operators: tuple[BackwardError, ...]
    """By side, in the order of the way back."""
    parameters: tuple[ParameterDifference, ...]
    first: BackwardError | None
    """The first on the way back that is beyond its bound; None where nothing but rounding was found."""
