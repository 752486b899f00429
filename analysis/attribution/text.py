"""An attribution as text."""

from __future__ import annotations

from ..rows import shown
from .attribution import Attribution, Onset, Suspect

_SHOWN = 0.02
"""Suspects below this probability are named without their evidence."""


def attribution_text(found: Attribution) -> str:
    """The verdict, then what moved first, the suspects with their evidence, and what would decide."""
    found = shown(found)
    parts = [found.sentence]
    if found.differences:
        parts.append("The run and its control differ:\n" + "\n".join(f"  {each}" for each in found.differences))
    if found.onsets:
        parts.append("What moved (first, with or after the fall):\n" + "\n".join(map(_onset, found.onsets)))
    likely = [suspect for suspect in found.suspects if suspect.probability >= _SHOWN]
    parts += [_suspect(suspect) for suspect in likely]
    others = [f"{s.title} {s.probability:.1%}" for s in found.suspects if s.probability < _SHOWN]
    if others:
        parts.append("Hardly: " + ", ".join(others))
    if found.notes:
        parts.append("\n".join(f"Note: {note}" for note in found.notes))
    return "\n\n".join(parts)


def _onset(onset: Onset) -> str:
    when = f"step {onset.step} ({onset.low} to {onset.high})"
    return f"  {onset.order:<5} {onset.series:<26} {when:<28} {onset.before:.3g} -> {onset.after:.3g}"


def _suspect(suspect: Suspect) -> str:
    lines = [f"{suspect.title}: {suspect.probability:.0%}"]
    for each in suspect.evidence:
        word = "for" if each.points > 0 else "against" if each.points < 0 else "neither"
        lines.append(f"  {word:<8}{each.points:+.1f}  {each.sentence}")
    if suspect.next:
        lines.append(f"  would decide: {suspect.next}")
    return "\n".join(lines)
