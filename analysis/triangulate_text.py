"""`tim-trace triangulate` as text."""

from __future__ import annotations

from .replay_text import not_held_reason
from .rows import Rows, shown, table, to_text
from .triangulate import Triangulation


def triangulation_text(found: Triangulation, width: int | None = None) -> str:
    """Render which side is wrong."""
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
        ("correlation", f"{found.correlation:.3g} of the two errors"),
        ("resolution", f"{found.resolution:.1g} nats: the reference is kept as float32"),
    ]
    parts = [
        found.sentence,
        "\n".join(f"{name:<11}  {value}" for name, value in facts),
        to_text(triangulation_rows(found), width),
    ]
    parts += [to_text(rows, width) for rows in (found.arms, found.by_probability, found.by_position) if len(rows)]
    return "\n\n".join(parts)


def triangulation_rows(found: Triangulation, by: str = "side") -> Rows:
    """One row per side, per arm, or per bin of the reference's probability or of the token's position."""
    sides = table(found.sides)
    return {
        "side": Rows(("side", *sides.columns[1:]), sides.rows),
        "arm": found.arms,
        "probability": found.by_probability,
        "position": found.by_position,
    }[by]
