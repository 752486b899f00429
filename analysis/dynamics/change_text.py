"""A change in words."""

from __future__ import annotations

from .recorded import SET, RecordedChange
from .writers import WRITERS

_FACTOR = 1.5
"""Least factor that is told as one."""


def change_sentence(change: RecordedChange) -> str:
    """From what to what, when, and how that was done."""
    before, after = change.before, change.after
    if isinstance(before, str) or isinstance(after, str) or change.shape == SET:
        verb = "goes" if change.kind == WRITERS else "is set"
        return f"{change.series} {verb} from {_shown(before)} to {_shown(after)} at step {change.step}"
    verb = "jumps" if change.shape == "shift" else "begins to move"
    if before == 0 and after > 0:
        return f"{change.series} is exactly 0 until step {change.step}, then {_shown(after)}"
    when = f"at step {change.step}" + ("" if change.low == change.high else f" ({change.low} to {change.high})")
    if min(before, after) > 0:
        factor = after / before
        if factor >= _FACTOR:
            told = f"{factor:,.0f}" if factor >= 100 else f"{factor:.3g}"
            return f"{change.series} {verb if change.shape == 'shift' else 'begins to grow'} {told}-fold {when}"
        if factor <= 1 / _FACTOR:
            fall = "drops" if change.shape == "shift" else "begins to fall"
            return f"{change.series} {fall} to {factor:.2g} of what it was {when}"
    return f"{change.series} {verb} from {_shown(before)} to {_shown(after)} {when}"


def _shown(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.3g}"
