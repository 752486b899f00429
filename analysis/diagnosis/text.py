"""A diagnosis as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ..alarms.text import alarm_sentence, reading_json, since, taken_over
from ..attribution.attribution import Attribution
from ..attribution.suspect import SUSPECTS, Suspect
from ..attribution.text import attribution_json, not_finite_clause, silent_clause, unsure_clause
from ..check.result import CheckResult
from ..check.text import checked_json, checked_text, wrapped
from ..dynamics.change_text import change_sentence
from ..dynamics.recorded import RecordedChange
from ..dynamics.timeline import MIN_VALUES
from ..locate_text import sentence as located_sentence
from ..rows import Rows, shown, to_text
from .diagnosis import Diagnosis, Numerics, ReplayEffect, SizeComparison


def diagnosis_text(found: Diagnosis, width: int | None = None, *, verbose: bool = False) -> str:
    """Write a diagnosis, for reading: the story, and an answer each to valid, why, normal and what is next.

    `verbose` adds the check's evidence, what was computed in, published figures, alarms and replays as tables.
    """
    found = shown(found)
    parts = [wrapped(story(found), "", width), _answers(found, width)]
    if verbose:
        parts += _tables(found, width)
    return "\n\n".join(parts)


def story(found: Diagnosis) -> str:
    """What happened, as one would tell it to a colleague: the first line of `diagnose`, and the report's headline."""
    return story_of_run(found.attribution, found.checked, found.jumps)


def story_of_run(attribution: Attribution, checked: CheckResult | None, jumps: Sequence[RecordedChange] = ()) -> str:
    """The story of a run; `checked` is None where there are no two passes to compare."""
    fall, broken = attribution.fall, not_finite_clause(attribution.not_finite)
    if fall is None:
        calm = "No fall is seen"
        if attribution.silent is not None:
            calm = f"No fall of {attribution.outcome} is seen, but {silent_clause(attribution.silent)}"
        if not attribution.outcome:
            calm = f"Neither a reward nor an evaluation was recorded at {MIN_VALUES} steps or more"
        if broken:
            calm = f"{broken}, and no fall is seen before" if attribution.outcome else broken
        jump = f"; {change_sentence(jumps[0])}" if jumps else ""
        if checked is None:
            valid = "there are no two passes to compare"
        elif checked.is_valid:
            valid = "the comparison is valid"
        else:
            valid = f"the comparison is not valid: {checked.findings[0].title}"
        return f"{calm}{jump}; {valid}."
    when = f"{fall.step}; {fall.interval[0]} to {fall.interval[1]}"
    lead = next(
        (change for change in attribution.changes if not change.follows and change.series != fall.onset_of), None
    )
    named = _named(attribution)
    lead = next((change for change in attribution.changes if change.series in named), lead)
    down = f"{fall.outcome} falls from {fall.before:.3g} to {fall.after:.3g} ({when})"
    said = f"{down}."
    if lead is not None:
        apart = fall.step - lead.step
        before = f"{apart} {'step' if apart == 1 else 'steps'} before"
        beside = before if apart > 0 else "the step where" if apart == 0 else "as"
        said = f"{change_sentence(lead)}, {beside} {down}."
    return f"{f'{broken}. ' if broken else ''}{said} {_cause(attribution, checked)}"


def _named(attribution: Attribution) -> set[str]:
    """The series that the evidence of the first suspect is about."""
    if not attribution.suspects:
        return set()
    first = attribution.suspects[0]
    series = {str(each.values["series"]) for each in first.evidence if "series" in each.values}
    if first.code in ("mismatch", "staleness"):
        series |= {"mean_abs_d", "k3"}
    return series


def _cause(attribution: Attribution, checked: CheckResult | None) -> str:
    first = attribution.suspects[0]
    if attribution.cause is None:
        clause = unsure_clause(attribution)
        return f"{clause[:1].upper()}{clause[1:]}."
    return f"Most probably {cause_title(first, checked)} ({first.probability:.0%})."


def cause_title(suspect: Suspect, checked: CheckResult | None) -> str:
    """A suspect in words; of a mismatch that grows at some step without the step, which stands beside it."""
    is_told = suspect.detail == "subset" and checked is not None and checked.findings[0].since is not None
    return SUSPECTS[suspect.code] if is_told else suspect.title


def _answers(found: Diagnosis, width: int | None) -> str:
    """A line or two for each question."""
    finding, attribution = found.checked.findings[0], found.attribution
    raised = [alarm_sentence(reading) for reading in found.alarms.raised]
    asked = [*attribution.suspects[:1], *([attribution.first_suspect] if attribution.first_suspect else [])]
    rows = [
        ("valid", f"{'yes' if found.checked.is_valid else 'NO'}: {finding.title}"),
        ("normal", size_text(found.size, is_valid=found.checked.is_valid)),
        (
            "alarms",
            f"{len(raised)} of {len(found.alarms.judged)} sound" + (f": {'; '.join(raised[:3])}" if raised else ""),
        ),
    ]
    if attribution.fall is not None:
        for_it = next(([one.sentence for one in each.for_it[:2]] for each in asked if each.for_it), [])
        how = "from this run alone"
        if attribution.control:
            how = "beside a control" if attribution.is_intervention else "beside another run"
        rows.insert(1, ("why", f"{'; '.join(for_it) or 'nothing that was recorded explains it'} ({how})"))
    settled = found.settled_by
    if settled is not None:
        rows.append(("replays", effect_text(settled)))
    if found.located is not None:
        where = found.located
        rows.append(("where", f"{located_sentence(where)} (a is {where.a}, b is {where.b}; step {where.step})"))
    lines = [_labelled(name, text, width) for name, text in rows]
    of_suspects = [each.next for each in asked if each.next and (each.code == attribution.cause or each.for_it)]
    advice = [*found.next, *of_suspects[:1]]
    lines += [_labelled("next", each, None) for each in dict.fromkeys(str(one) for one in advice[:2])]
    return "\n".join(lines)


def _labelled(name: str, text: str, width: int | None) -> str:
    """A text beside its label, in as many lines as it needs."""
    return f"{name:<8}{wrapped(text, ' ' * 8, width).strip()}"


def _tables(found: Diagnosis, width: int | None) -> list[str]:
    parts = [
        _titled("IS IT VALID?", checked_text(found.checked, width)),
        _titled("WHAT WAS COMPUTED IN?", wrapped(numerics_text(found.numerics), "", width)),
        _titled("IS IT NORMAL?", to_text(_figures(found), width)),
        _titled("WHICH ALARMS SOUND?", to_text(_alarms(found), width)),
    ]
    if found.replays:
        parts.append(_titled("WHAT DID REPLAYS SETTLE?", to_text(_replays(found), width)))
    if found.next:
        parts.append(_titled("WHAT WOULD SETTLE THE REST?", "\n".join(found.next)))
    return parts


def diagnosis_json(found: Diagnosis) -> dict[str, Any]:
    """The same as JSON can say it: codes, every number, and the sentences made from them."""
    told = asdict(found) | {"story": story(found), "attribution": attribution_json(found.attribution)}
    if found.located is not None:
        told["located"]["sentence"] = located_sentence(found.located)
    for replay, effect in zip(told["replays"], found.replays, strict=True):
        replay |= {"code": effect.code, "sentence": effect_text(effect)}
    told["alarms"] = [
        {"alarm": asdict(reading.alarm) | {"condition": reading.alarm.condition, "says": reading.alarm.summary}}
        | reading_json(reading)
        for reading in found.alarms.judged
    ]
    told["not_judged"] = list(found.alarms.not_judged)
    told["numerics"]["sentence"] = numerics_text(found.numerics)
    return told | {
        "checked": checked_json(found.checked),
        "normal": size_text(found.size, is_valid=found.checked.is_valid),
    }


def numerics_text(numerics: Numerics) -> str:
    """What each side computed in."""
    parts = []
    sides = zip(numerics.passes, numerics.declared, numerics.logits, numerics.values, strict=True)
    for name, dtype, logits, values in sides:
        seen = {
            None: "too few tokens share a context to show it",
            "float32": "its logits were not rounded to 16 bits",
        }.get(logits, f"its logits lie on the grid of {logits}")
        rounded = f", and its logprobs were rounded to {values}" if values not in (None, "float32") else ""
        parts.append(f"{name} {f'says {dtype}' if dtype else 'does not say its dtype'}; {seen}{rounded}.")
    return " ".join(parts)


def size_text(size: SizeComparison, *, is_valid: bool) -> str:
    """Whether the size of the mismatch is normal; no more than a number as long as the comparison is not valid."""
    if size.code == "equal":
        return "There is no mismatch."
    if size.code == "unpublished":
        said = f"The mismatch is {size.own:.3g} nats rms; no published figure has {size.coarser or 'an unknown dtype'} as its coarser side"
    else:
        said = (
            f"The mismatch of {size.own:.3g} nats rms is {size.code} what others measured with {size.coarser} as the coarser "
            f"side ({size.low:g} to {size.high:g})"
        )
    if not is_valid:
        return f"{said}; but it is no matter of numerics as long as the comparison is not valid."
    if size.code == "unpublished":
        return f"{said}."
    if size.code == "above":
        return f"{said}: more is normal for a small model and for tokens of low probability; else look for a cause."
    return f"{said}: it is normal."


def effect_text(effect: ReplayEffect) -> str:
    """What a replay does to the mismatch."""
    a, b = effect.pair
    return {
        "settles": f"with {effect.arm}, {a} would agree with {b}: it is what makes the mismatch",
        "repeats": f"{effect.arm} gives back {b}: its engine computes so from these weights and tokens",
        "part": f"{effect.arm} makes a part of the mismatch",
        "nothing": f"{effect.arm} does not make the mismatch",
        "adds": f"{effect.arm} would make the mismatch larger",
    }[effect.code]


def _titled(title: str, text: str) -> str:
    return f"{title}\n\n{text}"


def _figures(found: Diagnosis) -> Rows:
    chosen = [each for each in found.figures if each.fits] or list(found.figures)
    return Rows(
        ("metric", "this trace", "published", "dtypes", "model", "setting", "source"),
        [
            (
                each.figure.metric, each.own, _range(each.figure.low, each.figure.high), "/".join(each.figure.dtypes),
                each.figure.model, each.figure.setting, each.figure.source,
            )
            for each in chosen
        ],
    )  # fmt: skip


def _alarms(found: Diagnosis) -> Rows:
    return Rows(
        ("alarm", "this trace", "over", "level", "who", "definition", "meaning", "sounds"),
        [
            (
                "SOUNDS" if each.is_raised else "silent", each.own, taken_over(each), each.alarm.condition, each.alarm.who,
                each.alarm.definition, each.alarm.summary, since(each),
            )
            for each in (*found.alarms.raised, *(one for one in found.alarms.judged if not one.is_raised))
        ],
    )  # fmt: skip


def _replays(found: Diagnosis) -> Rows:
    return Rows(
        ("replay", "tokens", "gap_rms", "left_rms", "removed", "95 %", "what it says"),
        [
            (r.arm, r.num_tokens, r.gap_rms, r.left_rms, f"{r.removed:.1%}", _interval(r), effect_text(r))
            for r in found.replays
        ],
    )


def _interval(replay: ReplayEffect) -> str:
    if replay.low is None or replay.high is None:
        return f"none: {replay.no_interval}"
    return f"{replay.low:.1%} to {replay.high:.1%}"


def _range(low: float, high: float) -> str:
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"
