"""Render the result of `tim-trace locate --backward` as rows and as text."""

from __future__ import annotations

from ..replay.locate.backward_results import BETWEEN, DETACHED, PARAMETER, BackwardError, BackwardLocation
from ..schemas.errors import InvalidOption, option
from .main_columns import MAIN_COLUMNS
from .rows import Rows, shown, table, to_text

BY = ("kind", "operator", "layer", "parameter")
_MOST_ROWS = 12
"""Maximum number of table rows shown on a terminal."""


def check_by(by: str) -> None:
    """Raise InvalidOption for a grouping that gradients do not have."""
    if by not in BY:
        raise InvalidOption(f"got {by!r}; with {option('backward')} use {', '.join(BY)}", option="by")


def backward_rows(found: BackwardLocation, by: str = "kind") -> Rows:
    """Return one row per kind of operator, layer, parameter, or operator in backward order."""
    check_by(by)
    tables = {"kind": found.kinds, "operator": found.operators, "layer": found.layers, "parameter": found.parameters}
    return table(tables[by]).without({"kind": ("layer",), "layer": ("kind",)}.get(by, ()))


def backward_text(found: BackwardLocation, by: str = "kind", width: int | None = None) -> str:
    """Render where two gradients diverge."""
    named = found
    found = shown(found)
    apart = ""
    if found.difference is not None and found.cosine is not None:
        apart = f", |a - b| / |a| {found.difference:.3g}, cosine {found.cosine:.9g}"
    facts = [
        ("a", found.a),
        ("b", found.b),
        ("step", f"{found.step}, {found.num_sequences} sequences ({found.chosen}), {found.num_tokens:,} tokens in the loss"),
        ("gradient", f"|a| {found.norm_a:.4g}, |b| {found.norm_b:.4g}{apart}"),
    ]  # fmt: skip
    rows = backward_rows(found, by)
    printed = rows if by == "layer" else Rows(rows.columns, rows.rows[:_MOST_ROWS])
    return "\n\n".join([
        backward_sentence(named), "\n".join(f"{name:<9}  {value}" for name, value in facts),
        to_text(printed, width, MAIN_COLUMNS[f"backward_{by}s"]),
    ])  # fmt: skip


def backward_sentence(found: BackwardLocation) -> str:
    """Return one or two sentences that state where the gradients diverge."""
    if found.first is not None:
        return _first(found.first, found)
    if not found.norm_a and not found.norm_b:
        return "No gradient: the loss of the chosen sequences has no gradient in either execution."
    answer = "Only rounding: no operator's backward of a or b exceeds its bound."
    top = found.parameters[0] if found.parameters else None
    if top is None or not top.share:
        return f"{answer} Both gradients are identical."
    return f"{answer} {top.parameter} accounts for {top.share:.0%} of the squared difference of the gradients, more than any other parameter."


def _first(first: BackwardError, found: BackwardLocation) -> str:
    whose = f"{first.side} ({found.a if first.side == 'a' else found.b})"
    start = f"The first divergence in the backward pass is {first.operator} in {whose}"
    if first.what == DETACHED:
        return f"{start}: it is detached from autograd, so no gradient passes through."
    what = {
        PARAMETER: "the error of its parameter's gradient",
        BETWEEN: "the error of the gradient that reaches it from later operators",
    }.get(first.what, "the error of the gradient that it passes on")
    none = "" if first.dtype else "; there is no gradient at all"
    return f"{start}: {what} is {first.ratio:,.3g} times what rounding can cause{none}."
