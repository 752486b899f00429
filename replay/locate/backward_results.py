"""Where the gradients of two executions diverge, by parameter, operator, layer and kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ...schemas.results import Result

INPUT, PARAMETER, DETACHED, BETWEEN = "input", "parameter", "detached", "between"
"""Which of an operator's gradients is wrong: the one passed on to its input, that of a parameter, one that the operator
fails to pass on (detached), or the one that reaches the operator from later computations (residual stream, rotary,
product of gate and up, head, loss)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardError:
    """Error that one operator's backward pass introduces in one execution, over all its forward passes. It is measured
    against float64 on the same inputs."""

    side: str
    """`a` or `b`."""
    order: int
    """Position of the operator in the backward pass, starting at 0."""
    operator: str
    """Name of the module; `<operator>.output` for computations that follow an operator, `<layer>.residual` for the
    residual stream."""
    kind: str
    layer: int | None
    """Layer index from 0; None outside the layers."""
    what: str
    """Which gradient has the largest ratio: `input`, `parameter`, `detached` or `between`."""
    dtype: str
    """torch's name of the gradient's dtype; empty if there is no gradient."""
    introduced: float
    """Norm of the error that the operator introduced, relative to the norm of the exact gradient; the largest value
    over all forward passes."""
    ratio: float
    """Largest error introduced by the operator, divided by the bound on rounding error. A ratio above 1 cannot be
    explained by rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterDifference:
    """Comparison of one parameter's gradient between both executions. A tied parameter appears under the first of its
    names."""

    parameter: str
    kind: str
    """Kind of the operator that the parameter belongs to."""
    layer: int | None
    norm_a: float
    norm_b: float
    difference: float | None
    """|a - b| / |a|, as norms; None if a is 0."""
    cosine: float | None
    """Cosine similarity between gradients a and b; None if either is 0."""
    share: float
    """This parameter's share of |a - b|^2 over the whole gradient. The shares add up to 1, or to 0 if the gradients are
    equal."""
    introduced_a: float | None
    """Norm of the error that the operator's backward pass introduces in execution a, relative to the norm of the exact
    gradient on the same inputs; None if that is 0."""
    introduced_b: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientShare:
    """Gradient difference summed over the parameters in one kind of operator, or in one layer."""

    kind: str
    layer: int | None
    num_parameters: int
    norm_a: float
    norm_b: float
    difference: float | None
    """|a - b| / |a|, as norms; None if a is 0."""
    share: float
    """Share of these parameters in |a - b|^2 over the whole gradient."""
    ratio_a: float | None
    """Largest error that the backward pass of these operators introduces in execution a, divided by the bound on
    rounding error; None if none of them was judged."""
    ratio_b: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardLocation(Result):
    """Where the gradients of two executions diverge. The loss is the chosen sequences' share of a recorded step's
    loss."""

    _text = "tim_trace.analysis.locate_backward_text:backward_text"

    run: str
    step: int
    policy_version: int
    a: str
    b: str
    chosen: str
    """How the sequences were chosen: `worst`, `random` or `named`."""
    num_sequences: int
    num_tokens: int
    """Number of tokens that count in the loss."""
    norm_a: float
    norm_b: float
    difference: float | None
    """|a - b| / |a|, as norms over the whole gradient; None if a is 0."""
    cosine: float | None
    first: BackwardError | None
    """First operator in the backward pass whose introduced error exceeds the bound; None if rounding explains every
    error."""
    kinds: tuple[GradientShare, ...]
    layers: tuple[GradientShare, ...]
    parameters: tuple[ParameterDifference, ...]
    """Differences by parameter, largest share first."""
    operators: tuple[BackwardError, ...]
    """Errors by operator: first those of side a, then those of b, each in backward order."""


def gradient_shares(
    parameters: Sequence[ParameterDifference],
    operators: Sequence[BackwardError],
    key: Callable[[ParameterDifference | BackwardError], tuple[str, int | None]],
) -> Iterator[GradientShare]:
    """Yield the differences summed by a key of kind and layer, largest share first."""
    groups: dict[tuple[str, int | None], list[ParameterDifference]] = {}
    for each in parameters:
        groups.setdefault(key(each), []).append(each)
    ratios: dict[tuple[str, tuple[str, int | None]], float] = {}
    for error in operators:
        place = error.side, key(error)
        ratios[place] = max(ratios.get(place, 0.0), error.ratio)
    total = sum(_square_off(each) for each in parameters)
    rows = []
    for name, members in groups.items():
        norm_a, norm_b = (sum(getattr(each, side) ** 2 for each in members) ** 0.5 for side in ("norm_a", "norm_b"))
        share = sum(each.share for each in members)
        rows.append(
            GradientShare(
                kind=name[0],
                layer=name[1],
                num_parameters=len(members),
                norm_a=norm_a,
                norm_b=norm_b,
                difference=(share * total) ** 0.5 / norm_a if norm_a else None,
                share=share,
                ratio_a=ratios.get(("a", name)),
                ratio_b=ratios.get(("b", name)),
            )
        )
    yield from sorted(rows, key=lambda row: -row.share)


def _square_off(each: ParameterDifference) -> float:
    """Return |a - b|^2 of a parameter; |b|^2 if a is 0."""
    return each.norm_b**2 if each.difference is None else (each.difference * each.norm_a) ** 2
