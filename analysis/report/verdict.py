"""The first screen: what a reader who stops there has to know."""

from __future__ import annotations

from dataclasses import dataclass

from ...schemas.passes import REPLAY_PREFIX
from .answers import Answer, answers
from .subject import Subject

_LIKELY = 0.05
"""Probability of a suspect from which it is worth a rerun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What is known of a run, and what to do next."""

    sentence: str
    answers: tuple[Answer, ...]
    next: tuple[str, ...]
    """Commands, and what else would settle what is open; the first is the one to begin with."""
    recorded: tuple[str, ...]
    not_recorded: tuple[str, ...]
    """What the trace lacks, and what that leaves open."""


def verdict(subject: Subject) -> Verdict:
    """Put the answers of check, diagnose, objective and attribute together."""
    found = answers(subject)
    clauses = [answer.clause for answer in found if answer.clause]
    return Verdict(
        sentence=_capital("; ".join(clauses)) + "." if clauses else "Nothing can be said: the trace holds no step yet.",
        answers=found,
        next=_next(subject),
        recorded=_recorded(subject),
        not_recorded=_not_recorded(subject),
    )


def _next(subject: Subject) -> tuple[str, ...]:
    """What would settle most, first: a comparison that is not valid, then the cause of a fall, then what is open."""
    found: list[str] = []
    diagnosis, attribution = subject.diagnosis, subject.attribution
    if diagnosis and not diagnosis.checked.is_valid:
        found += diagnosis.next
    if attribution and attribution.fall:
        found += [
            suspect.next for suspect in attribution.suspects[:2] if suspect.next and suspect.probability >= _LIKELY
        ]
        if attribution.control is None:
            found.append(
                f"tim-trace attribute {subject.trace} --control RUN2   (RUN2: a rerun with the same seeds and one change)"
            )
    if diagnosis and diagnosis.checked.is_valid:
        found += diagnosis.next
    if diagnosis is None:
        found.append(f"tim-trace info {subject.trace}")
    if not found:
        level = 3 * max((diagnosis.metrics.get("k3", 0.0) if diagnosis else 0.0), 1e-6)
        found.append(f"tim-trace gate {subject.trace} --fail-on check --fail-on 'tim.k3>{level:.1g}'")
    return tuple(dict.fromkeys(found))


def _recorded(subject: Subject) -> tuple[str, ...]:
    held = subject.info
    steps = f"{held.num_steps:,} steps" + (f" ({held.first_step} to {held.last_step})" if held.num_steps else "")
    told = [f"{steps}, {held.num_sequences:,} sequences, {held.num_response_tokens:,} response tokens"]
    told += [
        f"pass {each.name}: {each.num_sequences:,} sequences{f' by {each.engine}' if each.engine else ''}"
        for each in held.passes
        if each.num_rows and not each.name.startswith(REPLAY_PREFIX)
    ]
    arms = [each.name.removeprefix(REPLAY_PREFIX) for each in held.passes if each.name.startswith(REPLAY_PREFIX)]
    if arms:
        told.append(f"{len(arms)} replay{'s' if len(arms) > 1 else ''}: {', '.join(arms)}")
    if held.num_metrics:
        told.append(f"{held.num_metrics:,} logged values")
    if held.num_bytes.get("weights"):
        told.append(f"weights of the policy, {held.num_bytes['weights'] / 1e6:,.1f} MB")
    return tuple(told)


def _not_recorded(subject: Subject) -> tuple[str, ...]:
    told = [*subject.info.missing, *subject.info.damaged]
    if subject.dynamics:
        told += subject.dynamics.unanswered
    if subject.objective:
        told += subject.objective.cannot
    if subject.attribution:
        told += subject.attribution.notes
    told += [f"{what}: {why}" for what, why in subject.unanswered.items()]
    return tuple(dict.fromkeys(told))


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
