from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...replay.arms import parse_arm
from ...schemas.passes import ROLLOUT
from ..alarms.reading import AlarmReadings
from ..alarms.text import ALARM_FORM, alarm_sentence, fired
from ..attribution.attribution import MIN_PROBABILITY_OF_SUSPECT, Attribution, Evidence, SupposedCause, Suspect
from ..attribution.text import (
    WHOLE_FORM,
    evidence_sentence,
    later_clause,
    named_series,
    not_finite_clause,
    unsure_clause,
)
from ..check.check import CheckResult
from ..check.faults import evidence_text
from ..check.finding import Finding, Number
from ..check.text import CHECKED_FORM, checked_text, data_text
from ..facts.changes import MIN_VALUES
from ..facts.recorded import RecordedChange, change_sentence, interval_text
from ..facts.series import FLAT, Fall
from ..locate_text import location_sentence
from ..location import Location
from ..rows import Form, Rows, counted, shown, to_text, wrapped
from .diagnosis import BrokenSide, Diagnosis, Numerics, ReplayEffect, SizeComparison, data_faults


def diagnosis_text(found: Diagnosis, width: int | None = None, *, verbose: bool = False) -> str:
    """Render the headline, then one answer per question. `verbose` adds tables."""
    found = shown(found)
    parts = [wrapped(story(found), "", width), _answers(found, width)]
    if verbose:
        parts += _tables(found, width)
    return "\n\n".join(parts)


def story(found: Diagnosis) -> str:
    return story_of_run(found.attribution, found.checked, found.jumps)


def checked_story(found: Diagnosis) -> str:
    """Return the headline, and the evidence of what `check` finds wrong."""
    checked = found.checked
    faults = [] if checked is None else [
        *(f"{each.title}: {evidence_text(each)}" for each in checked.findings if each.fails), *map(data_text, data_faults(checked)),
    ]  # fmt: skip
    return "\n".join([story(found), *(f"check finds {each}" for each in faults)])


def story_of_run(attribution: Attribution, checked: CheckResult | None, jumps: Sequence[RecordedChange] = ()) -> str:
    """Return a run's headline. `checked` is None if the trace has fewer than two passes."""
    fall, broken = attribution.fall, not_finite_clause(attribution.not_finite)
    if fall is None:
        calm = "No collapse detected"
        if changed := [note for note in attribution.note_codes if note.code == "reward_changed"]:
            calm += f", but the reward changed at step {changed[0].values['step']}"
        if not attribution.outcome:
            calm = f"Rewards or evaluations were recorded at fewer than {MIN_VALUES} steps"
            if any(note.values.get("num_series") == 0 for note in attribution.note_codes):
                calm = "No rewards or evaluations were recorded"
        if broken:
            calm = f"{broken}; no collapse detected before that" if attribution.outcome else broken
        calm += later_clause(attribution.later)
        jump = f"; {change_sentence(jumps[0])}" if jumps else ""
        valid = "no pair of passes to compare"
        if checked is not None and not checked.is_compared:
            valid = ", but ".join([valid, *_data_faults(checked)[:1]])
        elif checked is not None and not checked.is_valid:
            valid = f"the comparison is not valid: {checked.findings[0].title}"
        elif checked is not None and checked.has_few_tokens:
            valid = f"the comparison cannot be checked: {_few(checked)}"
        elif checked is not None:
            valid = ", but ".join(["the comparison is valid", *_data_faults(checked)[:1]])
        return f"{calm}{jump}; {valid}."
    named = named_series(attribution)
    causes = [change for change in attribution.changes if change.series in named]
    causes += [
        change
        for change in attribution.changes
        if not change.follows and change.series != fall.onset_of and change.step <= fall.step
    ]
    down = f"{fall.course} step {fall.step}{interval_text(*fall.interval)}"
    sentence = f"{down}."
    if causes:
        lead, apart = causes[0], fall.step - causes[0].step
        before = f"{apart} {'step' if apart == 1 else 'steps'} before"
        sentence = f"{change_sentence(lead)}, {before if apart > 0 else 'as'} {down}."
        if fall.kind == FLAT or apart < -1:  # the drop begins after fall.step
            sentence = f"{down}; {change_sentence(lead)}."
    return f"{f'{broken}. ' if broken else ''}{sentence} {_cause(attribution, checked)}"


def _few(checked: CheckResult) -> str:
    return f"only {counted(checked.num_tokens, 'comparable token')}"


def _data_faults(checked: CheckResult | None) -> list[str]:
    return [
        each.title if each.since is None else f"{each.title}, starting at step {each.since}"
        for each in (() if checked is None else data_faults(checked))
    ]


def _cause(attribution: Attribution, checked: CheckResult | None) -> str:
    if attribution.cause is None:
        return f"{unsure_clause(attribution)}."
    return f"Most likely cause: {as_cause(attribution.suspects[0], checked).titled()}."


def as_cause(suspect: Suspect, checked: CheckResult | None) -> Suspect:
    has_step = suspect.detail == "subset" and checked is not None and checked.findings[0].since is not None
    return replace(suspect, detail="") if has_step else suspect


def _answers(found: Diagnosis, width: int | None) -> str:
    attribution = found.attribution
    validity = "unknown: the trace has no tokens to check"
    if found.checked is not None:
        first = found.checked.findings[0]
        expected = ", as expected from the recorded settings" if first.is_declared else ""
        validity = f"{'yes' if found.is_valid else 'NO'}: {first.title}{expected}"
        if not found.checked.is_compared:
            validity = f"cannot tell: {evidence_text(first)}"
        elif found.checked.has_few_tokens:
            validity = f"cannot tell: {_few(found.checked)}"
    asked = [*attribution.suspects[:1], *([attribution.first_suspect] if attribution.first_suspect else [])]
    why = where = note = ""
    if attribution.fall is not None:
        for_it = next(([evidence_sentence(one) for one in each.for_it[:2]] for each in asked if each.for_it), [])
        how = "from this run alone"
        if attribution.control:
            how = "compared with the baseline" if attribution.is_intervention else "compared with another run"
        why = f"{'; '.join(for_it) or 'nothing recorded explains it'} ({how})"
    if (located := found.located) is not None:
        where = f"{location_sentence(located)} (a: {located.a}, b: {located.b}, step {located.step})"
    if found.checked is not None:
        note = "; ".join(each.title for each in found.checked.data if each.is_notice)
    answers = {
        "valid": validity, "why": why, "data": "; ".join(_data_faults(found.checked)),
        "broken": broken_text(found.broken) if found.broken else "", "normal": normal_text(found),
        "alerts": alerts_text(found, 3), "note": note, "replay": effect_text(found.settled_by) if found.settled_by else "", "where": where,
    }  # fmt: skip
    lines = [_labelled(name, text, width) for name, text in answers.items() if text]
    of_suspects = [each.next for each in asked if each.next and (each.code == attribution.cause or each.for_it)]
    advice = [*of_suspects[:1], *found.next]
    lines += [_labelled("next", each, None) for each in list(dict.fromkeys(map(str, advice)))[:2]]
    return "\n".join(lines)


def _labelled(name: str, text: str, width: int | None) -> str:
    return f"{name:<8}{wrapped(text, ' ' * 8, width).strip()}"


def _tables(found: Diagnosis, width: int | None) -> list[str]:
    tables = {
        "IS IT VALID?": checked_text(found.checked, width) if found.checked else "",
        "WHICH PRECISION?": wrapped(numerics_text(found.numerics), "", width),
        "IS IT NORMAL?": to_text(_figures(found), width),
        "WHICH ALERTS FIRED?": _alarms(found, width),
        "WHAT DO THE REPLAYS SHOW?": to_text(_replays(found), width) if found.replays else "",
        "WHAT TO RUN NEXT?": "\n".join(found.next),
    }
    return [f"{title}\n\n{text}" for title, text in tables.items() if text]


_LOGITS = {None: "too few tokens share a context to infer a logits dtype", "float32": "logits not rounded to 16 bits"}


def numerics_text(numerics: Numerics) -> str:
    parts = []
    sides = (numerics.passes, numerics.declared, numerics.logits, numerics.values, numerics.in_file)
    for name, dtype, logits, values, in_file in zip(*sides, strict=True):
        recorded = f"recorded as {dtype}" if dtype else "has no recorded dtype"
        if in_file:
            seen = f"the imported file rounds logprobs to {values}, so its logits dtype is unknown"
        else:
            seen = _LOGITS.get(logits, f"logits rounded to {logits}")
            seen += f", logprobs rounded to {values}" if values not in (None, "float32") else ""
        parts.append(f"{name} {recorded}; {seen}.")
    return " ".join(parts)


def alerts_text(found: Diagnosis, most: int | None = None) -> str:
    raised, checked = found.alarms.raised, found.checked
    count = fired(len(raised), len(found.alarms.judged))
    of_mismatch = any(each.alarm.of_mismatch for each in raised)
    if checked is not None and checked.is_valid and of_mismatch and found.unexplained_jump is None:
        count += f", but the check explains the mismatch ({checked.findings[0].title})"
    elif checked is not None and not checked.is_valid and not of_mismatch:
        is_judged = any(each.alarm.of_mismatch for each in found.alarms.judged)
        count += (", none for the mismatch" if raised else "; the mismatch reaches no alert level") if is_judged else ""
    named = "; ".join(alarm_sentence(reading) for reading in raised[:most])
    return f"{count}: {named}" if named else count


def normal_text(found: Diagnosis) -> str:
    if found.checked is None or not found.checked.is_compared:
        means = ", ".join(f"{name} {value:.3g}" for name, value in found.metrics.items() if name != "rms_d")
        return (
            f"Logged averages: {means}. {_NO_DTYPE[0].upper()}{_NO_DTYPE[1:]}." if means else "No mismatch was logged."
        )
    jump, valid = found.unexplained_jump, found.checked.is_valid
    if found.checked.has_few_tokens:
        return f"cannot tell: {_few(found.checked)}"
    if jump is None:
        return size_text(found.size, is_valid=valid, explanation=found.checked.findings[0].title)
    return (
        f"{_size_sentence(found.size)}, but {change_sentence(jump)}, and no recorded setting changed there; look for a "
        f"change that was not recorded."
    )


def broken_text(broken: BrokenSide) -> str:
    since = " since the first step" if broken.since is None else f" since step {broken.since}"
    other = "" if broken.other is None else f"; also {broken.other}, which did not cause the drop"
    if broken.is_stronger:
        other = f", not {broken.other}, for which the evidence is weaker"
    return f"{broken.side}{since} (found by {' and '.join(broken.by)}){other}"


def size_text(size: SizeComparison, *, is_valid: bool, explanation: str = "rounding") -> str:
    """Describe the mismatch and, if the comparison is valid, say whether it is normal."""
    if not is_valid:
        own = f"the mismatch is {size.own:.3g} nats rms over the whole run"
        own = "no token has a finite logprob in both passes" if math.isnan(size.own) else own
        return f"cannot tell until the fault is fixed; {own}"
    sentence = _size_sentence(size)
    if size.code in ("equal", "unpublished"):
        return f"{sentence}."
    return f"{sentence}: {f'the check explains it ({explanation})' if size.code == 'above' else 'normal'}."


_NO_DTYPE = "dtype not recorded, so there is no reference value"


def _size_sentence(size: SizeComparison) -> str:
    if size.code == "equal":
        return "No mismatch"
    if size.code == "unpublished":
        missing = f"no published value for {size.coarser}" if size.coarser else _NO_DTYPE
        return f"The mismatch is {size.own:.3g} nats rms; {missing}"
    dtype = f"{size.coarser}, inferred from the logprobs" if size.is_inferred else size.coarser
    where, published = str(size.code), f"range for {dtype} ({size.low:g} to {size.high:g})"
    if size.low == size.high:
        where, published = where.replace("within", "at"), f"value for {dtype} ({size.low:g})"
    return f"The mismatch of {size.own:.3g} nats rms is {where} the published {published}"


_CAUSES = {
    "weights_version": "{b} has the weights of version {value}: fix the weight sync",
    "quantize": "{b} has weights quantised to {value}: send unquantised weights, or correct for the mismatch",
    "kv_dtype": "{b}'s key-value cache is quantised with scale 1: use calibrated scales, or do not quantise the cache",
    "adapter": "{b} has the adapter {value}: treat the adapter the same way on both sides",
    "temperature": "{b}'s logprobs are at temperature {value}: compute both sides' logprobs at one temperature",
}


def cause_text(effect: ReplayEffect) -> str:
    """Return the cause that a replay without mismatch shows, and its fix. Empty if the change tells neither."""
    if effect.is_as_recorded:
        return "the recorded train logprobs are not those of the recorded weights and tokens: compare the trainer's padding, packing and model"
    changes = parse_arm(effect.changes).changes if effect.changes else {}
    b = "the engine" if effect.pair[1] == ROLLOUT else effect.pair[1]
    return next((text.format(b=b, value=changes[name]) for name, text in _CAUSES.items() if name in changes), "")


def version_text(effect: ReplayEffect, version: Number) -> str:
    """Return what a replay with the older recorded policy `version` shows of a lag without mismatch, or an empty string."""
    if not effect.changes or parse_arm(effect.changes).changes.get("weights_version") != version:
        return ""
    if effect.code == "adds":
        return f"{effect.pair[1]} does not have the weights of version {version}: correct the recorded policy versions"
    return f"an update changes the logprobs by less than rounding: version {version} gives the same mismatch"


def effect_text(effect: ReplayEffect) -> str:
    a, b = effect.pair
    cause = cause_text(effect).partition(": ")[0] or "this setting causes the mismatch"
    how = "replayed as recorded" if effect.is_as_recorded else f"with {effect.arm}"
    return {
        "settles": f"{how}, {a} agrees with {b}: {cause}",
        "repeats": f"{effect.arm} reproduces {b}: {b}'s engine computes the same values from the same weights and tokens",
        "part": f"{effect.arm} accounts for part of the mismatch",
        "nothing": f"{effect.arm} has no effect on the mismatch",
        "adds": f"{effect.arm} increases the mismatch",
    }[effect.code]


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


def _alarms(found: Diagnosis, width: int | None) -> str:
    from ..watch.screen import drawn_text  # deferred: only --verbose needs rich
    from ..watch.view import alarm_count, alarm_table

    lines = drawn_text(alarm_table(found.alarms.raised), width).splitlines()
    return "\n".join([alarm_count(found.alarms), *map(str.rstrip, lines)])


def _replays(found: Diagnosis) -> Rows:
    return Rows(
        ("replay", "tokens", "gap_rms", "left_rms", "removed", "95%", "result"),
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


DIAGNOSIS_FORM: Form = {
    **CHECKED_FORM, **WHOLE_FORM, **ALARM_FORM,
    Diagnosis: {"story": story, "normal": normal_text, "broken": Diagnosis.broken},
    Numerics: {"sentence": numerics_text},
    ReplayEffect: {"code": ReplayEffect.code, "sentence": effect_text},
    BrokenSide: {"sentence": broken_text},
    Location: {"sentence": location_sentence},
}  # fmt: skip


def _likely(found: Attribution | SupposedCause) -> tuple[Suspect, ...]:
    return tuple(each for each in found.suspects if each.probability >= MIN_PROBABILITY_OF_SUSPECT)


def _main_evidence(suspect: Suspect) -> tuple[Evidence, ...]:
    return suspect.for_it[:2]


def _fired(found: AlarmReadings) -> dict[str, int | None]:
    """Return the first step at which each alert fires, by the alert's code."""
    return {reading.alarm.code: reading.first_step for reading in found.raised}


_LEFT_OUT: Mapping[type, tuple[str, ...]] = {
    Diagnosis: ("figures",),
    AlarmReadings: ("judged",),
    CheckResult: ("owners", "note_codes"),
    Finding: ("signal", "weight", "is_expected", "cause", "side"),
    Attribution: ("changes", "facts", "steps", "num_steps", "note_codes", "difference_codes", "sentence"),
    Fall: ("onset_of", "low", "high", "fallen", "floor"),
}
_SHORTENED: Form = {
    AlarmReadings: {"num_judged": AlarmReadings.num_judged, "fired": _fired},
    CheckResult: {"data": data_faults},
    Attribution: {"suspects": _likely},
    SupposedCause: {"suspects": _likely},
    Suspect: {"evidence": _main_evidence},
}
SHORT_FORM: Form = {
    kind: {
        **DIAGNOSIS_FORM.get(kind, {}), **_SHORTENED.get(kind, {}), **dict.fromkeys(_LEFT_OUT.get(kind, ())),
    }
    for kind in {**DIAGNOSIS_FORM, **_SHORTENED, **_LEFT_OUT}
}  # fmt: skip
"""Output of `diagnose` without `verbose`: the likely suspects with their main evidence, and the alerts that fired."""
