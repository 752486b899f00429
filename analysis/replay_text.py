"""`tim-trace replay` as text."""

from __future__ import annotations

from collections.abc import Sequence

from ..replay.results import ReplayedStep, ReplayedSteps, by_arm
from .replay_estimates import replay_estimates
from .rows import table, to_text


def replay_text(found: Sequence[ReplayedStep], width: int | None = None) -> str:
    """Write replays for reading: a row an arm."""
    estimates = replay_estimates(found) if isinstance(found, ReplayedSteps) else []
    return to_text(table(estimates or by_arm(found)), width)
