"""Describe a change of a series in a sentence."""

from __future__ import annotations

from .recorded import SET, WRITERS, RecordedChange

_FACTOR = 1.5
"""Minimum ratio of the two values for the sentence to state a factor."""


def change_sentence(change: RecordedChange) -> str:
    """Return a sentence with the series, its old and new value, and the step of the change."""
    before, after = change.before, change.after
    if isinstance(before, str) or isinstance(after, str) or change.shape == SET:
        verb = "goes" if change.kind == WRITERS else "is set"
        return f"{change.series} {verb} from {_shown(before)} to {_shown(after)} at step {change.step}"
    verb = "jumps" if change.shape == "shift" else "starts to change"
    if before == 0 and after > 0:
        return f"{change.series} is exactly 0 until step {change.step}, then {_shown(after)}"
    when = f"at step {change.step}" + interval_text(change.low, change.high)
    if min(before, after) > 0:
        factor = after / before
        if factor >= _FACTOR:
            times = f"{factor:,.0f}" if factor >= 100 else f"{factor:.3g}"
            return f"{change.series} {verb if change.shape == 'shift' else 'starts to grow'} {times}-fold {when}"
        if factor <= 1 / _FACTOR:
            drop = "drops" if change.shape == "shift" else "starts to drop"
            return f"{change.series} {drop} to {factor:.2g} times its earlier level {when}"
    return f"{change.series} {verb} from {_shown(before)} to {_shown(after)} {when}"


def interval_text(low: int, high: int) -> str:
    """Return the 95% confidence interval of a step in parentheses; empty if it is one step wide."""
    return "" if low == high else f" (95% CI {low}-{high})"


def _shown(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.3g}"
