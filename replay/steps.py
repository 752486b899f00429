"""Which steps to replay, as people write them."""

from __future__ import annotations

from collections.abc import Sequence

from ..schemas.errors import InvalidOption


def parse_steps(text: str, recorded: Sequence[int]) -> list[int]:
    """The recorded steps that a text names: `3`, `2:8` (both ends included), `2:8:2`, `all`, or several with commas.

    Raises InvalidOption for a text that names none.

    >>> parse_steps("1,3:5", [1, 2, 3, 4, 5, 6])
    [1, 3, 4, 5]
    """
    chosen: set[int] = set()
    for part in text.split(","):
        chosen |= _part(part.strip(), text, recorded)
    if not chosen:
        span = f"{recorded[0]} to {recorded[-1]}" if recorded else "none"
        raise InvalidOption(f"steps: {text!r} names no recorded step; recorded: {span}")
    return sorted(chosen)


def _part(part: str, text: str, recorded: Sequence[int]) -> set[int]:
    if part == "all":
        return set(recorded)
    try:
        bounds = [int(number) if number else None for number in part.split(":")]
    except ValueError:
        bounds = []
    if not 1 <= len(bounds) <= 3 or (len(bounds) == 1 and bounds[0] is None):
        raise InvalidOption(f"steps: got {text!r}; write 3, 2:8, 2:8:2 or all")
    if len(bounds) == 1:
        return {step for step in recorded if step == bounds[0]}
    first = recorded[0] if bounds[0] is None else bounds[0]
    last = recorded[-1] if bounds[1] is None else bounds[1]
    stride = bounds[2] if len(bounds) == 3 and bounds[2] else 1
    return {step for step in recorded if first <= step <= last and (step - first) % stride == 0}
