"""`tim-trace replay` as text."""

from __future__ import annotations

from collections.abc import Sequence

from ..replay.results import ReplayedStep, by_arm
from .rows import table, to_text


def replay_text(found: Sequence[ReplayedStep], width: int | None = None) -> str:
    """Write replays for reading: a row an arm."""
    return to_text(table(by_arm(found)), width)
