"""Render `tim-trace replay`: plan and results."""

from __future__ import annotations

from collections.abc import Sequence

from ..replay.backends.trusted import WHY
from ..replay.plan import ReplayPlan
from ..replay.results import ReplayedStep, by_arm
from .rows import Rows, table, to_text


def plan_text(plan: ReplayPlan, width: int | None = None) -> str:
    """Render the plan of a replay: one row per arm."""
    return to_text(plan_rows(plan), width)


def plan_rows(plan: ReplayPlan) -> Rows:
    """Return a plan as a table."""
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
    """Explain why replaying as recorded did not reproduce the recorded bits."""
    return WHY[code].format(name="").replace("  ", " ")


def replay_text(found: Sequence[ReplayedStep], width: int | None = None) -> str:
    """Render replays: one row per arm."""
    return to_text(table(by_arm(found)), width)
