"""Which steps are read: their sizes, and every way of choosing some of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from .database import Database, cached

CHUNK_TOKENS = 32 << 20
"""Tokens that are joined at once."""

CHUNK_STEPS = 1024
"""Steps that are joined at once."""


@cached
def tokens_by_step(database: Database, run: str | None = None) -> dict[int, int]:
    """Step -> response tokens, in order, of a run; of all runs where none is named."""
    query = """
        SELECT step, sum(num_response_tokens)::BIGINT FROM sequences WHERE $run IS NULL OR run = $run
        GROUP BY step ORDER BY step
    """
    return dict(database.connection.execute(query, {"run": run}).fetchall())


def step_ranges(tokens: Mapping[int, int], most_tokens: int = CHUNK_TOKENS) -> list[range]:
    """Ranges of steps that fit in memory, in order; a larger step is one alone.

    >>> step_ranges({1: 10, 2: 20, 5: CHUNK_TOKENS})
    [range(1, 3), range(5, 6)]
    """
    ranges: list[range] = []
    num_tokens = num_steps = 0
    for step, num in tokens.items():
        if ranges and num_tokens + num <= most_tokens and num_steps < CHUNK_STEPS:
            ranges[-1] = range(ranges[-1].start, step + 1)
            num_tokens, num_steps = num_tokens + num, num_steps + 1
        else:
            ranges.append(range(step, step + 1))
            num_tokens, num_steps = num, 1
    return ranges


def evenly_spaced(steps: Sequence[int], most: int) -> list[int]:
    """Up to `most` evenly spaced steps, endpoints included; of one the first.

    >>> evenly_spaced([1, 2, 3, 4, 5], 3)
    [1, 3, 5]
    """
    if most <= 0 or not steps:
        return []
    places = np.unique(np.linspace(0, len(steps) - 1, min(most, len(steps))).round().astype(int))
    return [steps[place] for place in places]


def evenly_within(steps: Sequence[int], most: int) -> list[int]:
    """Up to `most` evenly spaced steps, endpoints included; of one the middle.

    >>> evenly_within([1, 2, 3, 4, 5], 1)
    [3]
    """
    return [steps[len(steps) // 2]] if most == 1 and steps else evenly_spaced(steps, most)


def neighbouring_pairs(steps: Sequence[int], most: int) -> list[int]:
    """Up to `most` steps in evenly spaced pairs of neighbours, so that each can be compared with the next.

    >>> neighbouring_pairs([1, 2, 3, 4, 5, 6], 4)
    [1, 2, 5, 6]
    """
    if len(steps) <= most:
        return list(steps)
    pairs = most // 2
    firsts = np.linspace(0, len(steps) - 2, pairs).astype(int) if pairs > 1 else [(len(steps) - 1) // 2]
    return sorted({steps[place + more] for place in firsts for more in (0, 1)})


def fitting(steps: Iterable[int], tokens: Mapping[int, int], max_tokens: int) -> set[int]:
    """Steps that fit in `max_tokens`, in order; at least one.

    >>> fitting([3, 1, 2], {1: 5, 2: 1, 3: 4}, 6)
    {2, 3}
    """
    chosen: set[int] = set()
    used = 0
    for step in steps:
        if step not in chosen and (not chosen or used + tokens[step] <= max_tokens):
            chosen.add(step)
            used += tokens[step]
    return chosen


def notable_first(steps: Sequence[int], notable: Sequence[int], most: int) -> tuple[list[int], list[int]]:
    """Up to `most` steps: the notable ones among them, and others evenly spaced.

    >>> notable_first([1, 2, 3, 4, 5], [4, 9], 3)
    ([4], [1, 5])
    """
    known = set(steps)
    first = [step for step in dict.fromkeys(notable) if step in known][:most]
    rest = [step for step in steps if step not in set(first)]
    return first, evenly_spaced(rest, most - len(first))
