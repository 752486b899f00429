"""`tim-trace locate --backward` as text."""

from __future__ import annotations

from ..replay.locate.backward_results import BETWEEN, DETACHED, PARAMETER, BackwardError
from .locate_backward import BackwardLocation, backward_rows
from .main_columns import MAIN_COLUMNS
from .rows import Rows, shown, to_text

_MOST_ROWS = 12
"""Of a table, on a terminal."""


def backward_text(found: BackwardLocation, by: str = "kind", width: int | None = None) -> str:
    """Write where two gradients part, for reading."""
    named = found
    found = shown(found)
    facts = [
        ("a", found.a),
        ("b", found.b),
        ("step", f"{found.step}, {found.num_sequences} sequences ({found.chosen}), {found.num_tokens:,} tokens in the loss"),
        ("gradient", f"|a| {found.norm_a:.4g}, |b| {found.norm_b:.4g}{_apart(found)}"),
    ]  # fmt: skip
    parts = [backward_sentence(named), "\n".join(f"{name:<9}  {value}" for name, value in facts)]
    rows = backward_rows(found, by)
    shown_rows = rows if by == "layer" else Rows(rows.columns, rows.rows[:_MOST_ROWS])
    parts.append(to_text(shown_rows, width, MAIN_COLUMNS[f"backward_{by}s"]))
    return "\n\n".join(parts)


def _apart(found: BackwardLocation) -> str:
    if found.difference is None or found.cosine is None:
        return ""
    return f", |a - b| / |a| {found.difference:.3g}, cosine {found.cosine:.9g}"


def backward_sentence(found: BackwardLocation) -> str:
    """The answer in a sentence or two."""
    if found.first is not None:
        return _first(found.first, found)
    if not found.norm_a and not found.norm_b:
        return "There is no gradient: the chosen sequences' share of the loss has none in either execution."
    said = "Nothing but rounding: no operator's backward of a or b is beyond its bound."
    top = found.parameters[0] if found.parameters else None
    if top is None or not top.share:
        return f"{said} Both gradients are the same."
    return f"{said} Of the squared difference of the gradients, {top.parameter} has {top.share:.0%}, more than any other parameter."


def _first(first: BackwardError, found: BackwardLocation) -> str:
    whose = f"{first.side} ({found.a if first.side == 'a' else found.b})"
    start = f"The first divergence on the way back is {first.operator} in {whose}"
    size = f"{first.ratio:,.3g} times what rounding can do"
    if first.what == DETACHED:
        return f"{start}: autograd does not follow it, so that no gradient passes through."
    none = "" if first.dtype else "; there is no gradient at all"
    what = {
        PARAMETER: "the gradient of its parameter is off by",
        BETWEEN: "what comes back there from the operators behind is off by",
    }.get(first.what, "what it passes on is off by")
    return f"{start}: {what} {size}{none}."
