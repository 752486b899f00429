"""The five questions that a run is asked, each with the code of its answer, and what to do next."""

from __future__ import annotations

from dataclasses import dataclass

from ..advice import Advice
from ..attribution.text import note_sentences, verdict_sentence
from ..dynamics.text import unanswered_sentences
from ..objective.judged import Estimate
from ..objective.verdict import LARGE, SMALL, is_opposed
from . import text
from .commands import command
from .subject import Subject
from .text import AnswerText

GOOD, NOTICE, BAD, OPEN = "good", "notice", "bad", "open"
"""Severity of an answer: fine, worth a look, wrong, or not to be told from this trace."""

_LIKELY = 0.05
"""Probability of a suspect from which it is worth a rerun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer to one of the questions."""

    question: str
    """Of text.QUESTIONS."""
    code: str
    """validity: `valid`, or the code of the first fault; factor: that of the first finding, or `replay`; size: of text.SIZES;
    objective: of text.EFFECTS; fall: `none`, `unknown_cause`, or the code of the cause. `unknown` where a trace cannot tell."""
    severity: str
    """`good`, `notice`, `bad` or `open`."""
    text: AnswerText
    command: str
    """The command that says more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """The first screen: what a reader who stops there has to know."""

    sentence: str
    """The story of the run: see diagnosis.text."""
    answers: tuple[Answer, ...]
    next: tuple[Advice, ...]
    """Commands, and what else would settle what is open; the first is the one to begin with."""
    recorded: tuple[str, ...]
    not_recorded: tuple[str, ...]
    """What the trace lacks, and what that leaves open."""


def summarise(subject: Subject) -> RunSummary:
    """Put the answers of check, diagnose, objective and attribute together."""
    answers = (
        validity_answer(subject),
        factor_answer(subject),
        size_answer(subject),
        objective_answer(subject),
        fall_answer(subject),
    )
    return RunSummary(
        sentence=text.headline(subject.diagnosis, subject.attribution),
        answers=answers,
        next=_next(subject),
        recorded=text.recorded(subject.info),
        not_recorded=_not_recorded(subject),
    )


def validity_answer(subject: Subject) -> Answer:
    verb = command(subject, "check")
    if subject.diagnosis is None:
        why = subject.unanswered.get("diagnosis", "")
        words = text.unknown(why, "nothing to compare")
        return _answer("validity", "unknown", OPEN, words, verb)
    checked = subject.diagnosis.checked
    code, severity = ("valid", GOOD) if checked.is_valid else (checked.findings[0].code, BAD)
    return _answer("validity", code, severity, text.validity(checked), verb)


def factor_answer(subject: Subject) -> Answer:
    found, verb = subject.diagnosis, command(subject, "diagnose")
    if found is None:
        words = text.unknown("a mismatch needs two passes")
        return _answer("factor", "unknown", OPEN, words, verb)
    replay = found.settled_by
    if replay is not None:
        severity = GOOD if found.checked.is_valid else BAD
        return _answer("factor", "replay", severity, text.settled_factor(found, replay), verb)
    first = found.checked.findings[0]
    return _answer("factor", first.code, NOTICE if first.fails else GOOD, text.factor(found), verb)


def size_answer(subject: Subject) -> Answer:
    found, verb = subject.diagnosis, command(subject, "diagnose")
    if found is None:
        words = text.unknown("a mismatch needs two passes")
        return _answer("size", "unknown", OPEN, words, verb)
    code = found.size.code if found.checked.is_valid else "not_valid"
    sounding = any(each.alarm.of_mismatch for each in found.alarms.raised) and found.size.code != "unpublished"
    severity = (
        NOTICE if found.size.code == "above" or sounding else OPEN if code in ("unpublished", "not_valid") else GOOD
    )
    return _answer("size", code, severity, text.size(found, code), verb)


def objective_answer(subject: Subject) -> Answer:
    found, verb = subject.objective, command(subject, "objective")
    relative = found.figures.get("relative_bias") if found else None
    if found is None or relative is None or relative.value is None:
        words = text.no_effect(found, subject.unanswered.get("objective", ""))
        return _answer("objective", "unknown", OPEN, words, verb)
    if any(part.code == "in_ratio" for part in found.verdict_codes):
        return _answer("objective", "in_ratio", NOTICE, text.in_ratio(found, subject.part), verb)
    size, push = abs(found.value("relative_abs_bias") or 0.0), abs(relative.value)
    unclipped = found.figures.get("unclipped_relative_bias")
    pushes = not _straddles(relative) and push >= SMALL
    severity = BAD if size >= LARGE else NOTICE if pushes else GOOD
    code = _effect(relative, push, size) if pushes or size >= SMALL else "negligible"
    if code in ("small_push", "small_push_large_noise", "large_push") and is_opposed(relative, unclipped):
        code = "opposed"
    return _answer("objective", code, severity, text.effect(found, code, relative, unclipped, subject.part), verb)


def _effect(relative: Estimate, push: float, size: float) -> str:
    """Of text.EFFECTS: one way by how much, or no way, and how large what cancels is."""
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


def fall_answer(subject: Subject) -> Answer:
    found, verb = subject.attribution, command(subject, "attribute")
    if found is not None and found.fall is None and found.not_finite:
        return _answer("fall", "not_finite", BAD, text.no_numbers(found), verb)
    if found is None or not found.outcome:
        why = verdict_sentence(found) if found else subject.unanswered.get("attribution", "")
        return _answer("fall", "unknown", OPEN, text.unknown(why), verb)
    if found.silent is not None:
        return _answer("fall", "unseen", OPEN, text.unseen_fall(found.silent, found), verb)
    if found.fall is None:
        return _answer("fall", "none", GOOD, text.no_fall(found), verb)
    return _answer(
        "fall",
        found.cause or "unknown_cause",
        BAD,
        text.fall(found, subject.diagnosis.checked if subject.diagnosis else None),
        verb,
    )


def _answer(question: str, code: str, severity: str, words: AnswerText, verb: str) -> Answer:
    return Answer(question=question, code=code, severity=severity, text=words, command=verb)


def _next(subject: Subject) -> tuple[Advice, ...]:
    """What would settle most, first: a comparison that is not valid, then the cause of a fall, then what is open."""
    found: list[Advice] = []
    diagnosis, attribution = subject.diagnosis, subject.attribution
    if diagnosis and not diagnosis.checked.is_valid:
        found += diagnosis.next
    if attribution and attribution.fall:
        found += [
            suspect.next for suspect in attribution.suspects[:2] if suspect.next and suspect.probability >= _LIKELY
        ]
        if attribution.control is None:
            rerun = command(subject, "attribute", "--control", "RUN2")
            found.append(Advice(rerun, "RUN2: a rerun with the same seeds and one change"))
    if diagnosis and diagnosis.checked.is_valid:
        found += diagnosis.next
    if diagnosis is None:
        found.append(Advice(command(subject, "info")))
    if not found:
        level = 3 * max((diagnosis.metrics.get("k3", 0.0) if diagnosis else 0.0), 1e-6)
        found.append(Advice(command(subject, "gate", "--fail-on", "check", "--fail-on", f"tim.k3>{level:.1g}")))
    first: dict[str, Advice] = {}
    for advice in found:
        first.setdefault(advice.command or advice.remark, advice)
    return tuple(first.values())


def _not_recorded(subject: Subject) -> tuple[str, ...]:
    """What a trace lacks, and what that leaves open."""
    told = [*subject.info.missing, *subject.info.damaged]
    if subject.dynamics:
        told += unanswered_sentences(subject.dynamics)
    if subject.objective:
        told += subject.objective.cannot
    if subject.attribution:
        told += note_sentences(subject.attribution)
    told += [f"{what}: {why}" for what, why in subject.unanswered.items()]
    return tuple(dict.fromkeys(told))
