"""Where the gradients of two executions part, by parameter, operator, layer and kind."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..replay.locate.backward import locate_backward as locate_gradients
from ..replay.locate.backward_results import BackwardError, LocatedBackward, ParameterDifference
from ..replay.locate.engine import REFERENCE
from ..schemas.errors import InvalidOption, option
from ..schemas.results import Result
from ..tracer.progress import Progress, no_progress
from .rows import Rows, table

BY = ("kind", "operator", "layer", "parameter")


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientShare:
    """The parameters of a kind of operator, or of a layer."""

    kind: str
    layer: int | None
    num_parameters: int
    norm_a: float
    norm_b: float
    difference: float | None
    """|a - b| / |a|, in lengths; None where a is 0."""
    share: float
    """Of |a - b|^2 of the whole gradient."""
    ratio_a: float | None
    """Largest own error of these operators' backward in a, in units of the bound of rounding; None where none was held against it."""
    ratio_b: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardLocation(Result):
    """Where the gradients of two executions part, of some sequences' share of a recorded step's loss."""

    _text = "tim_trace.analysis.locate_backward_text:backward_text"

    run: str
    step: int
    policy_version: int
    a: str
    b: str
    chosen: str
    num_sequences: int
    num_tokens: int
    """That count in the loss."""
    norm_a: float
    norm_b: float
    difference: float | None
    """|a - b| / |a| of the whole gradient; None where a is 0."""
    cosine: float | None
    first: BackwardError | None
    """The first operator on the way back whose own error is beyond its bound; None where nothing but rounding was found."""
    kinds: tuple[GradientShare, ...]
    layers: tuple[GradientShare, ...]
    parameters: tuple[ParameterDifference, ...]
    operators: tuple[BackwardError, ...]


def locate_backward(
    trace: str | os.PathLike[str],
    *,
    steps: str = "-1",
    arm: str | None = None,
    against: str = REFERENCE,
    sequences: str = "8",
    loss: str | None = None,
    model_factory: str | None = None,
    against_factory: str | None = None,
    weights_from: str | os.PathLike[str] | None = None,
    progress: Progress = no_progress,
) -> BackwardLocation:
    """Find where the gradients of two executions of recorded sequences part: `tim-trace locate --backward`.

    The chosen sequences' share of the recorded loss is differentiated through a, `arm` (by default as recorded), and b,
    `against` (by default in float64), arms as `gradient` takes them. Of each operator, what it passes on of what came back to
    it is held against float64 on the same numbers: an error that came before does not count. `loss` says fields of the loss where
    the trace does not. The other options are those of `locate`.

    Nothing is written. Raises CannotReplay, WeightsMissing, DamagedTrace, InvalidOption, TraceNotFound.
    """
    found = locate_gradients(
        trace, steps=steps, arm=arm, against=against, sequences=sequences, loss=loss, model_factory=model_factory,
        against_factory=against_factory, weights_from=weights_from, progress=progress,
    )  # fmt: skip
    return backward_location(found)


def backward_location(found: LocatedBackward) -> BackwardLocation:
    """The differences of parameters, summed by kind and by layer."""
    return BackwardLocation(
        run=found.run,
        step=found.step,
        policy_version=found.policy_version,
        a=found.a,
        b=found.b,
        chosen=found.chosen,
        num_sequences=found.num_sequences,
        num_tokens=found.num_tokens,
        norm_a=found.norm_a,
        norm_b=found.norm_b,
        difference=found.difference,
        cosine=found.cosine,
        first=found.first,
        kinds=tuple(_shares(found, lambda each: (each.kind, None))),
        layers=tuple(_shares(found, lambda each: ("", each.layer))),
        parameters=tuple(sorted(found.parameters, key=lambda each: -each.share)),
        operators=found.operators,
    )


def _shares(
    found: LocatedBackward, key: Callable[[ParameterDifference | BackwardError], tuple[str, int | None]]
) -> Iterator[GradientShare]:
    """A row a key, the largest share first."""
    groups: dict[tuple[str, int | None], list[ParameterDifference]] = {}
    for each in found.parameters:
        groups.setdefault(key(each), []).append(each)
    ratios: dict[tuple[str, tuple[str, int | None]], float] = {}
    for error in found.operators:
        place = error.side, key(error)
        ratios[place] = max(ratios.get(place, 0.0), error.ratio)
    total = sum(_square_off(each) for each in found.parameters)
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
    """|a - b|^2 of a parameter; that of b where a is 0."""
    return each.norm_b**2 if each.difference is None else (each.difference * each.norm_a) ** 2


def check_by(by: str) -> None:
    """Raises InvalidOption for rows that gradients do not have."""
    if by not in BY:
        raise InvalidOption(f"got {by!r}; with {option('backward')} use {', '.join(BY)}", option="by")


def backward_rows(found: BackwardLocation, by: str = "kind") -> Rows:
    """A row a kind of operator, a layer, a parameter, or an operator on the way back."""
    check_by(by)
    tables = {"kind": found.kinds, "operator": found.operators, "layer": found.layers, "parameter": found.parameters}
    return table(tables[by]).without({"kind": ("layer",), "layer": ("kind",)}.get(by, ()))
