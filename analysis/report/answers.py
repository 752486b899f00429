"""The five questions that a run is asked, each with its answer."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..attribution.attribution import Attribution
from ..check.result import CheckResult
from ..check.text import evidence_text
from ..diagnosis.diagnosis import Diagnosis
from ..diagnosis.text import effect_text, numerics_text, size_text
from ..objective.judged import Estimate, Objective
from ..objective.verdict import LARGE, SMALL
from .commands import command as command_of
from .subject import Subject

GOOD, NOTICE, BAD, OPEN = "good", "notice", "bad", "open"
"""How an answer sounds: fine, worth a look, wrong, or not to be told from this trace."""


_UNSEEN = 1e-4
"""Share of the objective below which the sentence on top tells no digits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer to one of the questions."""

    question: str
    sounds: str
    """`good`, `notice`, `bad` or `open`."""
    short: str
    """In a few words."""
    clause: str
    """Its part of the sentence on top; empty where it adds nothing."""
    figure: str
    """The number that it rests on, with its unit; empty where there is none."""
    sureness: str
    """How far it can be trusted: tokens, an interval, a probability."""
    detail: str
    """The evidence, in the words of the command that found it."""
    command: str
    """The command that says more."""


def answers(subject: Subject) -> tuple[Answer, ...]:
    """Is it valid, which factor, is it normal, did it bend the objective, did the run fall?"""
    return _valid(subject), _factor(subject), _normal(subject), _bends(subject), _fell(subject)


def _valid(subject: Subject) -> Answer:
    question, command = "Is the comparison valid?", command_of(subject, "check")
    if subject.diagnosis is None:
        why = subject.unanswered.get("diagnosis", "")
        return _open(question, "nothing to compare", "there are no two passes to compare", why, command)
    checked = subject.diagnosis.checked
    first = checked.findings[0]
    return Answer(
        question=question,
        sounds=GOOD if checked.is_valid else BAD,
        short="valid" if checked.is_valid else f"not valid: {first.title}",
        clause="the comparison is valid" if checked.is_valid else f"the comparison is not valid: {first.title}",
        figure=f"{checked.rms_d:.3g} nats rms between {checked.pair.replace(':', ' and ')}",
        sureness=_tokens(checked),
        detail=evidence_text(first),
        command=command,
    )


def _tokens(checked: CheckResult) -> str:
    if checked.num_sampled_tokens >= checked.num_tokens:
        return f"all {checked.num_tokens:,} tokens looked at one by one"
    return f"{checked.num_tokens:,} tokens in sums, {checked.num_sampled_tokens:,} of them one by one"


def _factor(subject: Subject) -> Answer:
    question, command = "Which factor makes the gap?", command_of(subject, "diagnose")
    found = subject.diagnosis
    if found is None:
        return _open(question, "cannot be told", "", "without two passes there is no gap to explain", command)
    first = found.checked.findings[0]
    size = f"{first.effect:.3g} nats rms on " if math.isfinite(first.effect) else ""
    replay = found.settled_by
    if replay is not None:
        return Answer(
            question=question, sounds=GOOD if found.checked.is_valid else BAD, short=f"settled by a replay: {replay.arm}",
            clause=f"a replay with {replay.arm} removes {replay.removed:.0%} of the gap",
            figure=f"{replay.removed:.1%} of the gap's mean square removed", sureness=f"{replay.num_tokens:,} tokens replayed",
            detail=f"{effect_text(replay)}. {numerics_text(found.numerics)}", command=command,
        )  # fmt: skip
    return Answer(
        question=question, sounds=NOTICE if first.fails else GOOD, short=first.title,
        clause="" if first.fails else f"the gap is {first.title}",
        figure=f"{size}{first.share:.1%} of the tokens",
        sureness="what logprobs and contracts show; a replay would settle it" if found.next else "as far as logprobs show",
        detail=numerics_text(found.numerics), command=command,
    )  # fmt: skip


def _normal(subject: Subject) -> Answer:
    question, command = "Is its size normal?", command_of(subject, "diagnose")
    found = subject.diagnosis
    if found is None:
        return _open(question, "cannot be told", "", "without two passes there is no gap to measure", command)
    sounding = [each for each in found.alarms if each.is_raised]
    above = found.size.code == "above"
    unknown = found.size.code == "unpublished"
    word = "larger than published ones" if above else "not published for these dtypes" if unknown else "normal"
    if found.checked.findings[0].code == "equal":
        word = "there is no gap"
    if not found.checked.is_valid:
        word = "cannot be told before the comparison is valid"
    is_open = unknown or not found.checked.is_valid
    sounds = NOTICE if above or (sounding and not unknown) else OPEN if is_open else GOOD
    clause = "" if unknown or not found.checked.is_valid else f"its size is {word}"
    return Answer(
        question=question, sounds=sounds, short=word, clause=clause,
        figure=f"{len(sounding)} of {len(found.alarms)} published alarm levels sound",
        sureness="against figures measured by others with these dtypes", detail=_alarms(found), command=command,
    )  # fmt: skip


def _alarms(found: Diagnosis) -> str:
    sounding = [
        f"{each.alarm.who}: {each.alarm.definition} = {each.own:.3g}" for each in found.alarms if each.is_raised
    ]
    size = size_text(found.size, is_valid=found.checked.is_valid)
    return size + (f" Sounding: {'; '.join(sounding)}." if sounding else "")


def _bends(subject: Subject) -> Answer:
    question, command = "Did it bend the objective?", command_of(subject, "objective")
    found = subject.objective
    relative = found.figures.get("relative_bias") if found else None
    if found is None or relative is None or relative.value is None:
        told = " ".join((*found.verdict, *found.cannot)) if found else subject.unanswered.get("objective", "")
        return _open(question, "cannot be told", "what it did to the objective cannot be told", told, command)
    size, push = abs(found.value("relative_abs_bias") or 0.0), abs(relative.value)
    pushes = not _straddles(relative) and push >= SMALL
    sounds = BAD if size >= LARGE else NOTICE if pushes else GOOD
    word = _way(relative, push, size) if pushes or size >= SMALL else "next to nothing"
    return Answer(
        question=question, sounds=sounds, short=word,
        clause=f"it moves the objective by {_moved(relative, found)}",
        figure=f"{_percent(relative.value, '+')} of sum |f|, {_percent(size)} without cancelling",
        sureness=(_interval(relative, found).strip(" ()") or f"no interval: {relative.no_interval}") + f", {subject.part}",
        detail=" ".join(found.verdict), command=command,
    )  # fmt: skip


def _way(relative: Estimate, push: float, size: float) -> str:
    """In the words of objective: one way by how much, or no way, and how large what cancels is."""
    if relative.low is None or relative.high is None:
        return "whether it pushes one way cannot be told"
    if _straddles(relative):
        return "noise" + (", and a large one" if size >= LARGE else "")
    if push < SMALL:
        return "next to nothing" if size < LARGE else "noise, and a large one"
    return (
        "a large push one way" if push >= LARGE else "a small push one way" + (", large noise" if size >= LARGE else "")
    )


def _moved(relative: Estimate, found: Objective) -> str:
    ends = [abs(each) for each in (relative.value, relative.low, relative.high) if each is not None]
    if max(ends) < _UNSEEN:
        return f"less than {_UNSEEN:.2%} of its size"
    return f"{_percent(relative.value or 0.0, '+')} of its size{_interval(relative, found)}"


def _percent(share: float, sign: str = "") -> str:
    return f"{share * 100:{sign}.3g}%"


def _straddles(estimate: Estimate) -> bool:
    return estimate.low is None or estimate.high is None or estimate.low <= 0 <= estimate.high


def _interval(estimate: Estimate, found: Objective) -> str:
    if estimate.low is None or estimate.high is None:
        return ""
    return f" ({found.confidence:.0%} interval {_percent(estimate.low, '+')} to {_percent(estimate.high, '+')})"


def _fell(subject: Subject) -> Answer:
    question, command = "Did the run fall, and why?", command_of(subject, "attribute")
    found = subject.attribution
    if found is None or not found.outcome:
        why = found.sentence if found else subject.unanswered.get("attribution", "")
        return _open(question, "cannot be told", "whether the run fell cannot be told", why, command)
    if found.fall is None:
        return Answer(
            question=question, sounds=GOOD, short="it did not fall", clause=f"{found.outcome} did not fall", figure="",
            sureness=f"{found.num_steps:,} steps", detail=found.sentence, command=command,
        )  # fmt: skip
    fall = found.fall
    return Answer(
        question=question, sounds=BAD, short=_cause(found),
        clause=f"{fall.outcome} {fall.verb} from step {fall.step} on; {_because(found)}",
        figure=f"{fall.outcome} {fall.before:.3g} to {fall.after:.3g}, from step {fall.step} (95 % interval "
        f"{fall.interval[0]} to {fall.interval[1]})",
        sureness=f"{found.suspects[0].probability:.0%} by {found.kind}" + (" of one run" if found.control is None else ""),
        detail=found.sentence, command=command,
    )  # fmt: skip


def _cause(found: Attribution) -> str:
    return f"it fell: {found.suspects[0].title}" if found.cause else "it fell: the cause cannot be told"


def _because(found: Attribution) -> str:
    innocent = " and not the mismatch" if found.clears_mismatch else ""
    if found.cause is None:
        return f"why cannot be told from this trace{innocent and ', but it is not the mismatch'}"
    first = found.suspects[0]
    return f"the likeliest cause is {first.title} ({first.probability:.0%}){innocent}"


def _open(question: str, short: str, clause: str, why: str, command: str) -> Answer:
    return Answer(
        question=question, sounds=OPEN, short=short, clause=clause, figure="", sureness="", detail=why, command=command
    )
