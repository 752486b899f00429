"""The first screen: what a reader who stops there has to know."""

from __future__ import annotations

from dataclasses import dataclass

from ...schemas.passes import REPLAY_PREFIX
from .answers import Answer, answers
from .commands import command
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
                f"{command(subject, 'attribute', '--control', 'RUN2')}   (RUN2: a rerun with the same seeds and one change)"
            )
    if diagnosis and diagnosis.checked.is_valid:
        found += diagnosis.next
    if diagnosis is None:
        found.append(command(subject, "info"))
    if not found:
        level = 3 * max((diagnosis.metrics.get("k3", 0.0) if diagnosis else 0.0), 1e-6)
        found.append(command(subject, "gate", "--fail-on", "check", "--fail-on", f"tim.k3>{level:.1g}"))
    first: dict[str, str] = {}
    for advice in found:
        first.setdefault(split(advice)[0] or advice, advice)
    return tuple(first.values())


def split(advice: str) -> tuple[str, str]:
    """The command of an advice, to copy, and what is said of it; one of both may be empty."""
    if not advice.startswith("tim-trace "):
        return "", advice
    commanded, _, said = advice.partition("   (")
    if said:
        return commanded, said.removesuffix(")")
    commanded, _, said = advice.partition("  # ")  # a comment in scripts, but not in every shell that one types into
    return commanded, said


def _recorded(subject: Subject) -> tuple[str, ...]:
    held = subject.info
    steps = f"{held.num_steps:,} step{'s' if held.num_steps != 1 else ''}"
    if held.num_steps:
        steps += f" ({held.first_step} to {held.last_step})" if held.num_steps > 1 else f" ({held.first_step})"
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
