from __future__ import annotations

from collections.abc import Sequence

from .errors import InvalidOption

ALL_STEPS = "all"

FORMS = "3, 2:8, 2:8:2, -10: (the last ten), all, or a comma-separated list"


def parse_steps(text: str, recorded: Sequence[int], *, of: str = "") -> list[int]:
    """Return the recorded steps selected by `text`: `3`, `2:8` (inclusive), `2:8:2`, `all`, or a comma-separated list.

    Negative numbers count from the last recorded step: `-1` is the last, `-10:` the last ten.

    Raises InvalidOption if no step matches. `of` names the run in the error message.

    >>> parse_steps("1,3:5", [1, 2, 3, 4, 5, 6])
    [1, 3, 4, 5]
    >>> parse_steps("-2:", [1, 2, 3, 10, 20])
    [10, 20]
    """
    if not (chosen := select_steps(text, recorded)):
        span = f"{recorded[0]} to {recorded[-1]}" if recorded else "none"
        raise InvalidOption(
            f"{text!r} matches no recorded step{f' of {of}' if of else ''} (recorded: {span})", option="steps"
        )
    return chosen


def select_steps(text: str, recorded: Sequence[int]) -> list[int]:
    """Like `parse_steps`, but return an empty list if no step matches. Raises InvalidOption for invalid syntax."""
    return sorted(set().union(*(_part(part.strip(), text, recorded) for part in text.split(","))))


def _part(part: str, text: str, recorded: Sequence[int]) -> set[int]:
    if part == ALL_STEPS:
        return set(recorded)
    try:
        bounds = [int(number) if number else None for number in part.split(":")]
    except ValueError:
        bounds = []
    if not 1 <= len(bounds) <= 3 or (len(bounds) == 1 and bounds[0] is None):
        raise InvalidOption(f"got {text!r}, expected {FORMS}", option="steps")
    if not recorded:
        return set()
    ends = [bound if bound is None or bound >= 0 else recorded[max(bound, -len(recorded))] for bound in bounds[:2]]
    first = recorded[0] if ends[0] is None else ends[0]
    last = recorded[-1] if ends[-1] is None else ends[-1]
    stride = bounds[2] if len(bounds) == 3 and bounds[2] else 1
    return {step for step in recorded if first <= step <= last and (step - first) % stride == 0}


def named_range(text: str) -> tuple[int, int | None] | None:
    """Return the first and last step that `text` can select. The last is None if the range is open-ended.

    Return None if the range depends on which steps were recorded.

    >>> named_range("3,20:40:5")
    (3, 40)
    >>> named_range("8:")
    (8, None)
    >>> named_range("-1") is named_range("all") is None
    True
    """
    ranges = []
    for part in text.split(","):
        try:
            bounds = [int(number) if number.strip() else None for number in part.split(":")[:2]]
        except ValueError:
            return None
        first, last = bounds[0], bounds[-1]
        if first is None or first < 0 or (last is not None and last < 0):
            return None
        ranges.append((first, last))
    lasts = [last for _, last in ranges if last is not None]
    return min(first for first, _ in ranges), max(lasts) if len(lasts) == len(ranges) else None
