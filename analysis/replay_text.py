"""Render `tim-trace replay`, its plan, and `tim-trace triangulate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..replay.backends.trusted import WHY
from ..replay.plan import ReplayPlan
from ..replay.results import ReplayedStep, by_arm
from ..schemas.passes import TRAIN
from .rows import Rows, shown, table, to_text

if TYPE_CHECKING:
    from .triangulate import Triangulation


def plan_text(plan: ReplayPlan, width: int | None = None) -> str:
    """Render the plan of a replay: one row per arm."""
    return to_text(plan_rows(plan), width)


def plan_rows(plan: ReplayPlan) -> Rows:
    names, rows = plan._table()
    return Rows(tuple(names), [tuple(row) for row in rows])


def estimate_sentence(plan: ReplayPlan) -> str:
    """Render the expected duration of a replay."""
    assert plan.seconds is not None
    tokens, arms = sum(arm.num_tokens for arm in plan), [arm for arm in plan if arm.num_tokens]
    scoring_s = sum(arm.num_tokens / arm.tokens_per_s for arm in arms if arm.tokens_per_s)
    pace = f" at {tokens / scoring_s:,.0f} tokens/s" if scoring_s else ""
    loads = sum(arm.num_versions for arm in plan)
    return (
        f"about {_duration(plan.seconds)}: {tokens:,} tokens in {len(arms)} arm{'s' * (len(arms) != 1)}{pace}, "
        f"{loads:,} weight load{'s' * (loads != 1)}"
    )


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.2g} {unit}" if seconds < 10 * size else f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds" if seconds >= 10 else f"{seconds:.1f} seconds"


def not_held_reason(code: str) -> str:
    """Say why replaying as recorded did not reproduce the recorded bits."""
    return WHY[code].format(name="").replace("  ", " ")


def replay_text(found: Sequence[ReplayedStep], width: int | None = None) -> str:
    """Render replays: one row per arm."""
    return to_text(table(by_arm(found)), width)


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
        ("correlation", f"{found.correlation:.3g} of the two errors"),
        ("resolution", f"{found.resolution:.1g} nats: the reference is kept as float32"),
    ]
    parts = [
        triangulation_sentence(found),
        "\n".join(f"{name:<11}  {value}" for name, value in facts),
        to_text(triangulation_rows(found), width),
    ]
    if len(found.arms):
        parts.append(to_text(found.arms, width))
    return "\n\n".join(parts)


def triangulation_sentence(found: Triangulation) -> str:
    """Return one sentence that states how the mismatch splits between trainer and engine."""
    if found.gap_rms == 0.0:
        return "No mismatch: trainer and engine give every token the same logprob."
    larger = max(found.sides, key=lambda side: side.share)
    if larger.share < 0.6:
        trainer, engine = (f"{side.share:.0%}" for side in found.sides)
        return f"Both sides account for the mismatch: the trainer for {trainer} of its mean square, the engine for {engine}."
    who = "trainer" if larger.name == TRAIN else "engine"
    if larger.share_low is None or larger.share_high is None:
        interval = f"no interval: {found.no_interval}"
    else:
        interval = f"95% CI over {found.num_groups:,} groups: {larger.share_low:.1%} to {larger.share_high:.1%}"
    return f"The {who} accounts for {larger.share:.1%} of the mismatch (mean square of d; {interval})."


def triangulation_rows(found: Triangulation, by: str = "side") -> Rows:
    sides = table(found.sides)
    return found.arms if by == "arm" else Rows(("side", *sides.columns[1:]), sides.rows)
