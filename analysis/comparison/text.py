"""A comparison of two runs as text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..check.text import of_steps, wrapped
from ..main_columns import MAIN_COLUMNS
from ..rows import Rows, shown, to_text
from ..statement import Measured, sentences

if TYPE_CHECKING:
    from .comparison import Comparison, RunDifference

FIRST: Mapping[str, str] = {
    "steps": "step {step} has sequences in one of them alone",
    "setting": "{name} is {a} in A and {b} in B",
    "sampling": "sequences are sampled with {name} {a} in A and {b} in B",
    "contract": "{name} is {a} in A and {b} in B",
    "prompts": "the prompts are others ({num_shared} of {a} in A and {b} in B are shared)",
    "responses": "equal prompts get other responses ({a})",
    "logprobs": "{name} gives equal tokens other logprobs ({a} in A, {b} in B; {largest:.3g} nats apart at most, at step "
    "{largest_step})",
    "rewards": "equal responses earn other rewards ({a} in A, {b} in B; {share:.1%} of {num_pairs:,} do)",
    "advantages": "equal rewards become other advantages ({a} in A, {b} in B; {share:.1%} of {num_pairs:,} do)",
    "lag": "{name} is {a} in A and {b} in B",
    "series": "{name} is {a} in A and {b} in B{size}",
}
"""Kind of a difference -> what differs, after the step."""

NOTES: Mapping[str, str] = {
    "no_sequences": "no step has sequences in both, so that nothing but settings and series was held against each other",
    "only_a": "series of A alone: {series}",
    "only_b": "series of B alone: {series}",
}
"""Code of a note -> the sentence."""

_LONGEST = 13
"""Characters of a cell with text where a table has to fit."""
_NAME = 24


def sentence(found: Comparison) -> str:
    """What differs first."""
    if found.first is None:
        return f"Nothing differs that both traces hold, over {found.num_steps:,} steps."
    first = found.first
    more = len(found.differences) - 1
    others = "Nothing else differs." if not more else f"{more} more follow{'s' if more == 1 else ''}."
    return f"What differs first, from step {first.step} on: {_told(first)}. {others}"


def notes(found: Comparison) -> tuple[str, ...]:
    """What could not be held against each other."""
    return sentences(found.note_codes, NOTES)


def _told(one: RunDifference) -> str:
    values: dict[str, Any] = {"name": one.name, "step": one.step, "a": _value(one.a), "b": _value(one.b)}
    size = "" if one.size_in_sd is None else f", {one.size_in_sd:.3g} standard deviations apart"
    return FIRST[one.kind].format(**{**one.values, **values, "size": size})


def _value(value: Measured | None) -> str:
    if value is None:
        return "not recorded"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def comparison_text(found: Comparison, width: int | None = None) -> str:
    """Write a comparison, for reading: what differs first, a row a difference, and what does not differ."""
    found = shown(found)
    head = f"A: {found.a}{of_steps(found.steps)}\nB: {found.b}{of_steps(found.steps)}"
    parts = [wrapped(sentence(found), "", width), head]
    if found.differences:
        rows = comparison_rows(found).without(["detail"])
        parts.append(to_text(rows if width is None else _shortened(rows), width, MAIN_COLUMNS["compare"]))
    if found.same:
        parts.append(wrapped(f"The same bits at every step: {', '.join(found.same)}.", "", width))
    if found.within_scatter:
        parts.append(wrapped(f"Apart by no more than they scatter: {', '.join(found.within_scatter)}.", "", width))
    parts += [wrapped(f"note: {note}", "", width) for note in notes(found)]
    return "\n\n".join(parts)


def comparison_rows(found: Comparison) -> Rows:
    """A row a difference."""
    return Rows(
        ("kind", "name", "step", "a", "b", "sd", "detail"),
        [
            (one.kind, one.name or None, one.step, one.a, one.b, one.size_in_sd, _detail(one))
            for one in found.differences
        ],
    )


def _detail(one: RunDifference) -> str:
    return ", ".join(f"{name} {_value(value)}" for name, value in one.values.items())


def _shortened(rows: Rows) -> Rows:
    """The table with long texts cut off in the middle, and numbers of four digits."""
    cut = [
        tuple(_cut(cell, _NAME if name == "name" else _LONGEST) for name, cell in zip(rows.columns, row, strict=True))
        for row in rows.rows
    ]
    return Rows(rows.columns, cut)


def _cut(cell: Any, longest: int) -> Any:
    if isinstance(cell, float):
        return float(f"{cell:.4g}")
    if not isinstance(cell, str) or len(cell) <= longest:
        return cell
    half = (longest - 3) // 2
    return f"{cell[: longest - 3 - half]}...{cell[-half:]}"


def comparison_json(found: Comparison) -> dict[str, Any]:
    """The same as JSON can say it, with every number; sentences beside their codes."""
    differences = [asdict(one) | {"sentence": _told(one)} for one in found.differences]
    return asdict(found) | {"differences": differences, "sentence": sentence(found), "notes": notes(found)}
