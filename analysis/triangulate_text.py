"""Render the result of `tim-trace triangulate` as text."""

from __future__ import annotations

from ..schemas.passes import TRAIN
from .replay_text import not_held_reason
from .rows import Rows, shown, table, to_text
from .triangulate import Triangulation


def triangulation_text(found: Triangulation, width: int | None = None) -> str:
    """Render how the mismatch splits between trainer and engine."""
    found = shown(found)
    why = "" if found.not_held is None else f", because {not_held_reason(found.not_held)}"
    steps = f"{len(found.steps)} ({found.steps[0]} to {found.steps[-1]})"
    facts = [
        ("reference", found.reference),
        (
            "identity",
            "held: bitwise equal to the recording" if found.identity_held else f"NOT HELD{why}: see tim-trace replay",
        ),
        ("steps", steps),
        ("tokens", f"{found.num_tokens:,} in {found.num_sequences:,} sequences, {found.num_groups:,} groups"),
        ("mismatch", f"{found.gap_rms:.4g} nats rms (train - rollout)"),
        ("correlation", f"{found.correlation:.3g} between the two errors"),
        ("resolution", f"{found.resolution:.1g} nats, because the reference is stored as float32"),
    ]
    parts = [
        sentence(found),
        "\n".join(f"{name:<11}  {value}" for name, value in facts),
        to_text(triangulation_rows(found), width),
    ]
    if len(found.arms):
        parts.append(to_text(found.arms, width))
    return "\n\n".join(parts)


def sentence(found: Triangulation) -> str:
    """Return one sentence that states how the mismatch splits between trainer and engine."""
    if found.gap_rms == 0.0:
        return "No mismatch: trainer and engine give every token the same logprob."
    larger = max(found.sides, key=lambda side: side.share)
    if larger.share < 0.6:
        trainer, engine = (f"{side.share:.0%}" for side in found.sides)
        return f"Both sides account for the mismatch: the trainer for {trainer} of mean squared d, the engine for {engine}."
    who = "trainer" if larger.name == TRAIN else "engine"
    if larger.share_low is None or larger.share_high is None:
        interval = f"no interval: {found.no_interval}"
    else:
        interval = f"95% CI over {found.num_groups:,} groups: {larger.share_low:.1%} to {larger.share_high:.1%}"
    return f"The {who} accounts for {larger.share:.1%} of the mismatch (mean squared d; {interval})."


def triangulation_rows(found: Triangulation, by: str = "side") -> Rows:
    """Return one row per side or per arm."""
    sides = table(found.sides)
    return found.arms if by == "arm" else Rows(("side", *sides.columns[1:]), sides.rows)
