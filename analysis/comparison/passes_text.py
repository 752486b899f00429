from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..rows import Form, Rows, counted, of_steps, shown, to_text, wrapped
from .passes import (
    INERT_SETTING,
    OTHER_SETTING,
    SAME_SETTINGS,
    OddToken,
    PassComparison,
    PassGroup,
    SettingContradiction,
)

CONTRADICTIONS: Mapping[str, str] = {
    SAME_SETTINGS: "{passes} and {others} have the same recorded settings but different logprobs.",
    OTHER_SETTING: "{passes} ({setting} {value}) and {others} ({setting} {other_value}) are bitwise equal. In other "
    "passes, this setting alone changes the logprobs ({pairs}, e.g. {example}).",
    INERT_SETTING: "{passes} and {others} differ only in {setting} ({value}, {other_value}), but their logprobs "
    "differ. In other passes, this setting has no effect ({pairs}, e.g. {example}).",
}

_SHOWN = 20
"""Maximum number of sentences per group in text output. JSON output has all of them."""


def sentence(found: PassComparison) -> str:
    groups = found.groups
    num, num_classes = sum(group.num_passes for group in groups), sum(len(group.classes) for group in groups)
    over = "the same tokens" if len(groups) == 1 else f"{len(groups)} groups of shared tokens"
    odd = counted(sum(len(group.odd_tokens) for group in groups), "odd token")
    contradictions = counted(sum(len(group.contradictions) for group in groups), "setting contradiction")
    bits = "all logprobs are bitwise equal"
    if num_classes > len(groups):
        bits = f"logprobs are bitwise equal within each of {num_classes} classes and differ between classes"
    return f"{num} passes over {over}: {bits}; {odd} and {contradictions}."


def passes_text(found: PassComparison, width: int | None = None) -> str:
    found = shown(found)
    parts = [wrapped(sentence(found), "", width), f"run: {found.run}{of_steps(found.steps)}"]
    for group in found.groups:
        parts.append(
            f"{group.num_passes} passes, {counted(group.num_sequences, 'sequence')}, {group.num_tokens:,} tokens; "
            f"d = logprob - logprob of {group.reference}"
        )
        lines = [*map(odd_sentence, group.odd_tokens), *map(contradiction_sentence, group.contradictions)]
        parts += [wrapped(line, "", width) for line in lines[:_SHOWN]]
        if len(lines) > _SHOWN:
            parts.append(f"({len(lines) - _SHOWN} more with --json)")
        if len(group.classes) == 1:
            parts.append(wrapped(f"All are bitwise equal: {', '.join(group.classes[0].passes)}.", "", width))
            continue
        main = ("class", "pass", "passes", "shared", "equal", "mean_abs_d", "max_abs_d")
        parts.append(to_text(_class_rows(group), width, main))
        parts += [
            wrapped(f"class {number}: {', '.join(one.passes)}", "", width)
            for number, one in enumerate(group.classes, start=1)
            if len(one.passes) > 1
        ]
    if found.alone:
        parts.append(wrapped(f"Passes that share no token with another: {', '.join(found.alone)}.", "", width))
    return "\n\n".join(parts)


def _class_rows(group: PassGroup) -> Rows:
    return Rows(
        ("class", "pass", "passes", "tokens", "shared", "equal", "mean_abs_d", "max_abs_d", "at", "diverges", "settings"),
        [
            (
                number, one.passes[0], len(one.passes), one.num_tokens, one.num_shared, one.num_equal, one.mean_abs_d,
                one.max_abs_d, one.max_at[1] if one.max_at and one.max_abs_d else None,
                one.diverges_at[1] if one.diverges_at else None,
                ", ".join(f"{_short(name)} {own or 'unset'}" for name, (own, _) in one.settings.items()),
            )
            for number, one in enumerate(group.classes, start=1)
        ],
    )  # fmt: skip


def passes_rows(found: PassComparison) -> Rows:
    return Rows(
        (
            "group", "class", "pass", "num_tokens", "num_shared", "num_equal", "num_not_finite", "mean_abs_d", "max_abs_d",
            "max_seq_id", "max_token", "diverges_seq_id", "diverges_token", "num_diverged",
        ),
        [
            (
                group.reference, number, name, one.num_tokens, one.num_shared, one.num_equal, one.num_not_finite,
                one.mean_abs_d, one.max_abs_d, *(one.max_at or (None, None)), *(one.diverges_at or (None, None)), one.num_diverged,
            )
            for group in found.groups
            for number, one in enumerate(group.classes, start=1)
            for name in one.passes
        ],
    )  # fmt: skip


def odd_sentence(one: OddToken) -> str:
    odd = "" if one.num_others > 1 else " Either of the two may be wrong."
    size = "the only token at which this class differs"
    if one.typical is not None and one.expected is not None:
        size = f"{one.ratio:,.0f} times the class's median elsewhere (expected by chance: {one.expected:.2g} tokens)"
    others = f"the median of {one.num_others} other classes" if one.num_others > 1 else "the other class"
    return (
        f"Token {one.token} of {one.seq_id}: {one.value:.6g} in {_named(one.passes)}, but {one.others:.6g} in {others}. "
        f"|d| is {one.abs_d:.3g} nats, {size}.{odd}"
    )


def contradiction_sentence(one: SettingContradiction) -> str:
    name = _short(one.setting)
    value, other = ("unset" if each is None else each for each in (one.value, one.other_value))
    return CONTRADICTIONS[one.code].format(
        passes=_named(one.passes), others=_named(one.others), setting=name, value=value, other_value=other,
        pairs=counted(one.num_different if one.code == OTHER_SETTING else one.num_same, "pair"),
        example=" and ".join(one.example or ()),
    )  # fmt: skip


def _short(setting: str) -> str:
    return ", ".join(name.rpartition(".")[2] for name in setting.split(", "))


def _named(passes: Sequence[str]) -> str:
    return ", ".join(passes) if len(passes) < 3 else f"{passes[0]} and {len(passes) - 1} more"


PASSES_FORM: Form = {
    PassComparison: {"is_valid": PassComparison.is_valid, "sentence": sentence},
    OddToken: {"ratio": OddToken.ratio, "sentence": odd_sentence},
    SettingContradiction: {"sentence": contradiction_sentence},
}
