"""What the replays that a trace holds have settled."""

from __future__ import annotations

import math

import numpy as np

from ...schemas.passes import REPLAY_PREFIX
from ..statistics.estimators import Array
from ..statistics.intervals import Interval, NoInterval, bootstrap, ends, unit
from ..trace.database import Database, quoted
from ..trace.source import Pair
from .diagnosis import SETTLES, Settled

_ADDS_LITTLE = 0.1
_CONFIDENCE = 0.95

_SUMS = """
SELECT count(*) AS num, sum((logprob_a - logprob_b) ** 2) AS gap, sum((logprob_c - logprob_b) ** 2) AS "left",
       any_value({unit}) AS unit
FROM triangle({a}, {b}, {c}) JOIN sequences AS s USING (run, step, seq_id)
GROUP BY run, step, seq_id ORDER BY run, step, seq_id
"""
"""Of each sequence: its tokens, what lies between a and b and between c and b, and its group."""


def settled(database: Database, pair: Pair, passes: list[str]) -> tuple[Settled, ...]:
    """Every replay, put in the place of pass a: those that remove most of the gap first."""
    found = []
    database.define("triangle")
    for name in passes:
        if not name.startswith(REPLAY_PREFIX) or name in pair:
            continue
        query = _SUMS.format(a=quoted(pair[0]), b=quoted(pair[1]), c=quoted(name), unit=unit("s"))
        rows = database.ask(query).rows
        num, gap, left = (math.fsum(row[place] for row in rows) for place in range(3))
        if num and gap:
            gap_N, left_N = (np.array([row[place] for row in rows], np.float64) for place in (1, 2))
            interval = removed_interval(gap_N, left_N, np.array([row[3] for row in rows], np.uint64))
            found.append(_settled(name.removeprefix(REPLAY_PREFIX), pair, int(num), gap / num, left / num, interval))
    return tuple(sorted(found, key=lambda each: -each.removed))


def removed_interval(gap_N: Array, left_N: Array, unit_N: np.ndarray) -> Interval | NoInterval:
    """A 95 % interval over groups of 1 - left / gap, from what each sequence adds to both. No more than all can be removed."""
    found = bootstrap(
        {"removed": lambda t: 1 - t["left"] / t["gap"]}, {"gap": gap_N, "left": left_N}, unit_N, _CONFIDENCE
    )["removed"]
    return found if isinstance(found, NoInterval) else (found[0], min(found[1], 1.0))


def _settled(arm: str, pair: Pair, num: int, gap: float, left: float, interval: Interval | NoInterval) -> Settled:
    removed = 1 - left / gap
    if removed > SETTLES:
        sentence = f"with {arm}, {pair[0]} would agree with {pair[1]}: it is what makes the gap"
    elif removed > _ADDS_LITTLE:
        sentence = f"{arm} makes a part of the gap"
    elif removed > -_ADDS_LITTLE:
        sentence = f"{arm} does not make the gap"
    else:
        sentence = f"{arm} would make the gap larger"
    low, high = ends(interval) or (None, None)
    return Settled(
        arm=arm, num_tokens=num, gap_rms=gap**0.5, left_rms=left**0.5, removed=removed, low=low, high=high,
        no_interval=str(interval) if isinstance(interval, NoInterval) else None, sentence=sentence,
    )  # fmt: skip
