"""Where the gradients of two executions diverge, by parameter, operator, layer and kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ...schemas.results import Result

INPUT, PARAMETER, DETACHED, BETWEEN = "input", "parameter", "detached", "between"
"""Which gradient of an operator is wrong: the one it passes on, a parameter's, one it fails to pass on (detached), or
the one that reaches it from later operators (residual stream, rotary, product of gate and up, head, loss).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardError:
    """Error introduced by one operator's backward, over all forwards of one execution, against float64 on the same inputs."""

    side: str
    """`a` or `b`."""
    order: int
    """Position in the backward pass, from 0."""
    operator: str
    """Name of the module; `<operator>.output` for computations after it, `<layer>.residual` for the stream."""
    kind: str
    layer: int | None
    """Layer index from 0; None outside the layers."""
    what: str
    """`input`, `parameter`, `detached` or `between`: the gradient with the largest ratio."""
    dtype: str
    """torch's name of the gradient's dtype; empty if there is no gradient."""
    introduced: float
    """Norm of its own error relative to the norm of the exact gradient; the largest over all forwards."""
    ratio: float
    """Its largest own error divided by the rounding bound; above 1 rounding does not explain it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterDifference:
    """One parameter's gradient in both executions; a tied parameter has its first name."""

    parameter: str
    kind: str
    """Kind of its operator."""
    layer: int | None
    norm_a: float
    norm_b: float
    difference: float | None
    """|a - b| / |a|, as norms; None if a is 0."""
    cosine: float | None
    """Cosine of a and b; None if one is 0."""
    share: float
    """Share of |a - b|^2 of the whole gradient; the shares add up to 1, or to 0 if the gradients are equal."""
    introduced_a: float | None
    """Norm of the error introduced by its operator's backward in a, relative to the norm of the exact gradient on the
    same inputs; None if that is 0.
    """
    introduced_b: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientShare:
    """Parameters of one kind of operator, or of one layer."""

    kind: str
    layer: int | None
    num_parameters: int
    norm_a: float
    norm_b: float
    difference: float | None
    """|a - b| / |a|, as norms; None if a is 0."""
    share: float
    """Share of |a - b|^2 of the whole gradient."""
    ratio_a: float | None
    """Largest own error of these operators' backward in a divided by the rounding bound; None if none was judged."""
    ratio_b: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardLocation(Result):
    """Where the gradients of two executions diverge, for the share of some sequences in a recorded step's loss."""

    _text = "tim_trace.analysis.locate_backward_text:backward_text"

    run: str
    step: int
    policy_version: int
    a: str
    b: str
    chosen: str
    """How the sequences were chosen."""
    num_sequences: int
    num_tokens: int
    """Number of tokens that count in the loss."""
    norm_a: float
    norm_b: float
    difference: float | None
    """|a - b| / |a| of the whole gradient; None if a is 0."""
    cosine: float | None
    first: BackwardError | None
    """First operator in the backward pass whose own error exceeds its bound; None if rounding explains everything."""
    kinds: tuple[GradientShare, ...]
    layers: tuple[GradientShare, ...]
    parameters: tuple[ParameterDifference, ...]
    """Largest share first."""
    operators: tuple[BackwardError, ...]
    """By side, in backward order."""


def gradient_shares(
    parameters: Sequence[ParameterDifference],
    operators: Sequence[BackwardError],
    key: Callable[[ParameterDifference | BackwardError], tuple[str, int | None]],
) -> Iterator[GradientShare]:
    """Sum parameters by a key of kind and layer; yield the largest share first."""
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
