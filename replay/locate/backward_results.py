"""Where the gradients of two executions diverge, by parameter, operator, layer and kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ...schemas.results import Result

INPUT, PARAMETER, DETACHED, BETWEEN = "input", "parameter", "detached", "between"
"""What of an operator's backward is wrong: what it passed on, a parameter's gradient, or that it passed nothing on; or what came back
to it from the operators behind it (residual stream, rotary, product of gate and up, head, loss)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardError:
    """The error that one operator's backward introduces, over all forwards of one execution, against float64 on the same numbers."""

    side: str
    """`a` or `b`."""
    order: int
    """Its place on the way back, from 0."""
    operator: str
    """Name of the module; `<operator>.output` for what lies between it and the next ones, `<layer>.residual` for the stream."""
    kind: str
    layer: int | None
    """From 0; None outside of layers."""
    what: str
    """`input`, `parameter`, `detached` or `between`, of the largest ratio."""
    dtype: str
    """torch's name of the gradient's dtype; empty if there is no gradient."""
    introduced: float
    """Length of its own error, relative to that of the exact gradient; the largest of all forwards."""
    ratio: float
    """Its largest own error, in units of the rounding bound; above 1 it computes something else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterDifference:
    """One parameter's gradient in both executions; a tied one has its first name."""

    parameter: str
    kind: str
    """Of its operator."""
    layer: int | None
    norm_a: float
    norm_b: float
    difference: float | None
    """|a - b| / |a|, in lengths; None if a is 0."""
    cosine: float | None
    """Of a and b; None if one is 0."""
    share: float
    """Of |a - b|^2 of the whole gradient; these add up to 1 if the gradients differ, to 0 if they do not."""
    introduced_a: float | None
    """Length of the error that its operators' backward introduced in a, relative to that of the exact gradient on the same numbers;
    None if that is 0."""
    introduced_b: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientShare:
    """The parameters of a kind of operator, or of a layer."""

    kind: str
    layer: int | None
    num_parameters: int
    norm_a: float
    norm_b: float
    difference: float | None
    """|a - b| / |a|, in lengths; None if a is 0."""
    share: float
    """Of |a - b|^2 of the whole gradient."""
    ratio_a: float | None
    """Largest own error of these operators' backward in a, in units of the rounding bound; None if none was judged."""
    ratio_b: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardLocation(Result):
    """Where the gradients of two executions diverge, for some sequences' share of a recorded step's loss."""

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
    """Tokens that count in the loss."""
    norm_a: float
    norm_b: float
    difference: float | None
    """|a - b| / |a| of the whole gradient; None if a is 0."""
    cosine: float | None
    first: BackwardError | None
    """The first operator on the way back whose own error exceeds its bound; None if rounding explains everything."""
    kinds: tuple[GradientShare, ...]
    layers: tuple[GradientShare, ...]
    parameters: tuple[ParameterDifference, ...]
    """The largest share first."""
    operators: tuple[BackwardError, ...]
    """By side, in the order of the way back."""


def gradient_shares(
    parameters: Sequence[ParameterDifference],
    operators: Sequence[BackwardError],
    key: Callable[[ParameterDifference | BackwardError], tuple[str, int | None]],
) -> Iterator[GradientShare]:
    """Sum parameters by a key of kind and layer, the largest share first."""
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
    """|a - b|^2 of a parameter; that of b if a is 0."""
    return each.norm_b**2 if each.difference is None else (each.difference * each.norm_a) ** 2
