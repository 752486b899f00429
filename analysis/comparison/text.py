from __future__ import annotations

from collections.abc import Mapping

from ...schemas.errors import ColumnsLeftOut, warn
from ..rows import MAIN_COLUMNS, Form, Rows, counted, of_steps, shown, to_text, wrapped
from ..statement import Measured, sentences
from .comparison import Comparison, RunDifference
from .series import FEWEST

FIRST: Mapping[str, str] = {
    "steps": "step {step} has sequences in one run only",
    "setting": "{name} is {a} in A and {b} in B",
    "sampling": "sampling uses {name} {a} in A and {b} in B",
    "contract": "{name} is {a} in A and {b} in B",
    "prompts": "the prompts differ ({a} in A, {b} in B, {num_shared} shared)",
    "responses": "identical prompts get different responses ({a})",
    "columns": "identical responses have different values of {name} ({a}; {share:.1%} of {num_pairs:,} pairs differ)",
    "logprobs": "{name} gives identical tokens different logprobs ({a} in A, {b} in B; largest difference "
    "{largest:.3g} nats, at "
    "step {largest_step})",
    "rewards": "identical responses get different rewards ({a} in A, {b} in B; {share:.1%} of {num_pairs:,} pairs)",
    "advantages": "equal rewards give different advantages ({a} in A, {b} in B; {share:.1%} of {num_pairs:,} pairs)",
    "lag": "{name} is {a} in A and {b} in B",
    "series": "{statistic}{name} is {a} in A and {b} in B{size}",
}

NOTES: Mapping[str, str] = {
    "no_sequences": "no step has sequences in both runs, so only settings and series were compared",
    "only_a": "series only in A: {series}",
    "only_b": "series only in B: {series}",
}

_LONGEST, _NAME = 15, 20
"""Maximum length of a text cell, and of a name (characters), in a table with limited width."""


def sentence(found: Comparison) -> str:
    if found.first is None:
        return f"No difference in the data that both traces recorded, over {counted(found.num_steps, 'step')}."
    first = found.first
    more = len(found.differences) - 1
    others = "Nothing else differs." if not more else f"{more} more difference{'' if more == 1 else 's'} below."
    return f"First difference, at step {first.step}: {_clause(first)}. {others}"


def notes(found: Comparison) -> tuple[str, ...]:
    return sentences(found.note_codes, NOTES)


def _clause(one: RunDifference) -> str:
    values = {"name": one.name, "step": one.step, "a": _value(one.a), "b": _value(one.b)}
    size, statistic = "", ""
    if "statistic" in one.values:
        statistic, size = f"the {one.values['statistic']} of ", f" over {counted(int(one.values['num_steps']), 'step')}"
    if one.size_in_sd is not None:
        size += f", a difference of {one.size_in_sd:.3g} standard deviations"
    return FIRST[one.kind].format(**{**one.values, **values, "size": size, "statistic": statistic})


def _value(value: Measured | None) -> str:
    if value is None:
        return "not recorded"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def comparison_text(found: Comparison, width: int | None = None) -> str:
    found = shown(found)
    head = f"A: {found.a}{of_steps(found.steps)}\nB: {found.b}{of_steps(found.steps)}"
    parts = [wrapped(sentence(found), "", width), head]
    if found.differences:
        rows = comparison_rows(found).without(["detail"])
        if width is not None:
            longest = [_NAME if name == "name" else _LONGEST for name in rows.columns]
            cut = [tuple(map(_cut, row, longest)) for row in rows.rows]
            if cut != rows.rows:
                warn("long values truncated", ColumnsLeftOut)
            rows = Rows(rows.columns, cut)
        parts.append(to_text(rows, width, MAIN_COLUMNS["compare"]))
    if found.same:
        parts.append(wrapped(f"Bitwise equal at every step: {', '.join(found.same)}.", "", width))
    if found.within_scatter:
        judged = (
            "Equal within noise" if found.num_steps >= FEWEST else "Different, but too few steps to tell from noise"
        )
        parts.append(wrapped(f"{judged}: {', '.join(found.within_scatter)}.", "", width))
    parts += [wrapped(f"note: {note}", "", width) for note in notes(found)]
    return "\n\n".join(parts)


def _cut(cell: object, longest: int) -> object:
    if not isinstance(cell, str) or len(cell) <= longest:
        return cell
    half = (longest - 3) // 2
    return f"{cell[: longest - 3 - half]}...{cell[-half:]}"


def comparison_rows(found: Comparison) -> Rows:
    return Rows(
        ("kind", "name", "step", "a", "b", "sd", "detail"),
        [
            (
                one.kind, one.name or None, one.step, one.a, one.b, one.size_in_sd,
                ", ".join(f"{name} {_value(value)}" for name, value in one.values.items()),
            )
            for one in found.differences
        ],
    )  # fmt: skip


COMPARISON_FORM: Form = {Comparison: {"sentence": sentence, "notes": notes}, RunDifference: {"sentence": _clause}}
