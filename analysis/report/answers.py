"""Answer a report's five questions about one run."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..alarms.text import fired
from ..attribution.attribution import Attribution, Suspect
from ..attribution.text import verdict_sentence
from ..check.faults import evidence_text
from ..diagnosis.text import alerts_text, as_cause, effect_text, normal_text, numerics_text
from ..facts.recorded import interval_text
from ..facts.series import FLAT
from ..objective.verdict import LARGE, SMALL, Estimate, Objective, is_opposed
from .commands import command
from .subject import Subject

GOOD, NOTICE, BAD, OPEN = "good", "notice", "bad", "open"
SIGNS = {GOOD: "\u2713", NOTICE: "!", BAD: "\u2715", OPEN: "?"}

_EFFECTS = {
    "undecided": "bias not measurable",
    "negligible": "negligible",
    "noise": "noise, no measurable bias",
    "large_noise": "large noise, no measurable bias",
    "small_push": "small bias",
    "small_push_large_noise": "small bias, large noise",
    "large_push": "large bias",
    "opposed": "bias caused by clipping, with the opposite sign without the clip",
}

_SIZES = {
    "equal": "no mismatch",
    "unpublished": "no published value for these dtypes",
    "above": "above the published range",
    "within": "normal",
    "below": "normal",
    "changed": "changed during the run",
    "not_valid": "cannot tell",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    code: str
    """Identifies the answer: a code of a finding or cause, a key of _EFFECTS or _SIZES, or a word such as `valid`."""
    severity: str
    short: str
    figure: str = ""
    basis: str = ""
    detail: str
    """Evidence, as worded by the command that found it."""
    question: str = ""
    command: str = ""


def _unknown(detail: str, short: str = "unknown") -> Answer:
    return Answer(code="unknown", severity=OPEN, short=short, detail=detail)


# --- validity, factor, size -------------------------------------------------------------------------------------------------


def validity_answer(subject: Subject) -> Answer:
    if subject.diagnosis is None:
        return _unknown(subject.unanswered.get("diagnosis", ""), "nothing to compare")
    checked = subject.diagnosis.checked
    assert checked is not None
    first = checked.findings[0]
    tokens = f"{checked.num_tokens:,} tokens"
    basis = f"{tokens} (statistics on all, {checked.num_sampled_tokens:,} inspected individually)"
    if checked.num_sampled_tokens >= checked.num_tokens:
        basis = f"all {tokens} inspected individually"
    is_sure = checked.is_valid and not checked.has_few_tokens
    return Answer(
        code="valid" if is_sure else first.code, severity=GOOD if is_sure else OPEN if checked.is_valid else BAD,
        short="valid" if is_sure else first.title if checked.is_valid else f"not valid: {first.title}",
        figure=f"{checked.rms_d:.3g} nats rms between {checked.pair.replace(':', ' and ')}", basis=basis,
        detail=evidence_text(first),
    )  # fmt: skip


def factor_answer(subject: Subject) -> Answer:
    found = subject.diagnosis
    if found is None:
        return _unknown("a mismatch needs two passes")
    assert found.checked is not None
    numerics = numerics_text(found.numerics)
    if (replay := found.settled_by) is not None:
        return Answer(
            code="replay", severity=GOOD if found.checked.is_valid else BAD,
            short=f"confirmed by a replay: {replay.arm}",
            figure=f"removed {replay.removed:.1%} of mean squared d",
            basis=f"{replay.num_tokens:,} tokens replayed", detail=f"{effect_text(replay)}. {numerics}",
        )  # fmt: skip
    first = found.checked.findings[0]
    size = f"{first.effect:.3g} nats rms on " if math.isfinite(first.effect) else ""
    basis = "from logprobs and contracts" if found.next else "from logprobs"
    if first.signal == "engine_weights":
        basis = "from weight digests"
    elif found.next and subject.info.num_bytes.get("weights"):
        basis += "; a replay would confirm it"
    return Answer(
        code=first.code, severity=NOTICE if first.fails else GOOD, short=first.title,
        figure=f"{size}{first.share:.1%} of tokens",
        basis=basis, detail=numerics,
    )  # fmt: skip


def size_answer(subject: Subject) -> Answer:
    found = subject.diagnosis
    if found is None:
        return _unknown("a mismatch needs two passes")
    assert found.checked is not None
    is_known = found.checked.is_valid and not found.checked.has_few_tokens
    code = "changed" if found.unexplained_jump else found.size.code if is_known else "not_valid"
    is_alarming = any(each.alarm.of_mismatch for each in found.alarms.raised) and found.size.code != "unpublished"
    is_high = found.size.code == "above" or code == "changed" or is_alarming
    return Answer(
        code=code, severity=NOTICE if is_high else OPEN if code in ("unpublished", "not_valid") else GOOD,
        short=_SIZES[code], figure=fired(len(found.alarms.raised), len(found.alarms.judged)),
        basis="" if code == "unpublished" else "compared with published values for these dtypes",
        detail=f"{normal_text(found).removesuffix('.')}. Alerts: {alerts_text(found)}.",
    )  # fmt: skip


# --- objective ----------------------------------------------------------------------------------------------------------


def objective_answer(subject: Subject) -> Answer:
    found = subject.objective
    if found is None:
        return _unknown(subject.unanswered.get("objective", ""))
    relative = found.figures.get("relative_bias")
    if relative is None or relative.value is None:
        return _unknown(" ".join((*found.verdict, *found.cannot)))
    detail = " ".join(found.verdict)
    if any(part.code == "in_ratio" for part in found.verdict_codes):
        return Answer(
            code="in_ratio", severity=NOTICE, short="no bias, but clipping and correction weights act on the mismatch",
            figure=f"mean |d| of {found.value('mean_abs_d') or 0.0:.3g} nats in the ratio", basis=subject.part,
            detail=detail,
        )  # fmt: skip
    size, unclipped = abs(found.value("relative_abs_bias") or 0.0), found.figures.get("unclipped_relative_bias")
    pushes = not _straddles(relative) and abs(relative.value) >= SMALL
    code = _effect(relative, abs(relative.value), size) if pushes or size >= SMALL else "negligible"
    if code in ("small_push", "small_push_large_noise", "large_push") and is_opposed(relative, unclipped):
        code = "opposed"
    free = ""
    if unclipped is not None and unclipped.value is not None:
        interval = _interval(unclipped, found)
        free = f", {_percent(unclipped.value, '+')} without the clip{f' ({interval})' if interval else ''}"
    return Answer(
        code=code, severity=BAD if size >= LARGE else NOTICE if pushes else GOOD, short=_EFFECTS[code],
        figure=f"net bias {_percent(relative.value, '+')} of sum |f|{free}; absolute biases add up to {_percent(size)}",
        basis=f"{_interval(relative, found) or f'no interval: {relative.no_interval}'}, {subject.part}",
        detail=detail,
    )  # fmt: skip


def _effect(relative: Estimate, push: float, size: float) -> str:
    """Return a code that describes the net bias if its interval excludes 0, and otherwise the noise level."""
    if relative.low is None or relative.high is None:
        return "undecided"
    if _straddles(relative):
        return "large_noise" if size >= LARGE else "noise"
    if push < SMALL:
        return "large_noise" if size >= LARGE else "negligible"
    if push >= LARGE:
        return "large_push"
    return "small_push_large_noise" if size >= LARGE else "small_push"


def _straddles(estimate: Estimate) -> bool:
    return estimate.low is None or estimate.high is None or estimate.low <= 0 <= estimate.high


def _interval(estimate: Estimate, found: Objective) -> str:
    if estimate.low is None or estimate.high is None:
        return ""
    return f"{found.confidence:.0%} CI {_percent(estimate.low, '+')} to {_percent(estimate.high, '+')}"


def _percent(share: float, sign: str = "") -> str:
    return f"{share * 100:{sign}.3g}%"


# --- collapse -------------------------------------------------------------------------------------------------------------


def fall_answer(subject: Subject) -> Answer:
    found = subject.attribution
    if found is None:
        return _unknown(subject.unanswered.get("attribution", ""))
    detail, steps = verdict_sentence(found), f"{found.num_steps:,} steps"
    if found.fall is None and found.not_finite:
        return Answer(
            code="not_finite", severity=BAD,
            short=f"{', '.join(each.series for each in found.not_finite)} NaN or infinite until the end",
            figure=f"since step {found.not_finite[0].step}", basis=steps, detail=detail,
        )  # fmt: skip
    if not found.outcome:
        return _unknown(detail)
    if (supposed := found.supposed_cause) is not None:
        first = supposed.suspects[0]
        return Answer(
            code="unseen", severity=OPEN, short=f"no collapse detected; if there is one, likely cause: {first.title}",
            figure=f"since step {supposed.step}", basis=_probability(found, first), detail=detail,
        )  # fmt: skip
    fall = found.fall
    if fall is None:
        return Answer(code="none", severity=GOOD, short="no collapse", basis=steps, detail=detail)
    first = found.first_suspect or found.suspects[0]
    title = as_cause(first, subject.diagnosis.checked if subject.diagnosis else None).title
    return Answer(
        code=found.cause or "unknown_cause", severity=BAD,
        short=f"{'learning stalled' if fall.kind == FLAT else 'collapsed'}{', top suspect' if not found.cause and first.code != 'unknown' else ''}: {title}",
        figure=f"{fall.course} step {fall.step}{interval_text(*fall.interval)}",
        basis=_probability(found, first), detail=detail,
    )  # fmt: skip


def _probability(found: Attribution, first: Suspect) -> str:
    return f"{first.probability:.0%} by {found.kind}" + (" from one run" if found.control is None else "")


QUESTIONS = {
    "validity": ("Is the comparison valid?", validity_answer, "check"),
    "factor": ("What causes the mismatch?", factor_answer, "diagnose"),
    "size": ("Is its size normal?", size_answer, "diagnose"),
    "objective": ("Did it bias the objective?", objective_answer, "objective"),
    "fall": ("Did the run collapse, and why?", fall_answer, "attribute"),
}


def answers(subject: Subject) -> tuple[Answer, ...]:
    return tuple(
        replace(answer(subject), question=code, command=command(subject, verb))
        for code, (_, answer, verb) in QUESTIONS.items()
    )
