"""What the replays that a trace holds have settled."""

from __future__ import annotations

from ...schemas.passes import REPLAY_PREFIX
from ..database import Database, quoted
from ..gate.intervals import Interval, student_quantile
from ..source import Pair
from .diagnosis import Settled

_SETTLES = 0.9
"""Share of the gap that a replay must remove to have settled its cause."""
_ADDS_LITTLE = 0.1
_CONFIDENCE = 0.95

_SUMS = """
SELECT count(*), sum(num), sum(gap), sum("left"), sum(gap * gap), sum("left" * "left"), sum(gap * "left")
FROM (
    SELECT count(*) AS num, sum((logprob_a - logprob_b) ** 2) AS gap, sum((logprob_c - logprob_b) ** 2) AS "left"
    FROM triangle({a}, {b}, {c})
    GROUP BY run, step, seq_id
)
"""
"""Over sequences: how many, their tokens, what lies between a and b and between c and b, and the products of these two."""


def settled(database: Database, pair: Pair, passes: list[str]) -> tuple[Settled, ...]:
    """Every replay, put in the place of pass a: those that remove most of the gap first."""
    found = []
    database.define("triangle")
    for name in passes:
        if not name.startswith(REPLAY_PREFIX) or name in pair:
            continue
        query = _SUMS.format(a=quoted(pair[0]), b=quoted(pair[1]), c=quoted(name))
        ((num_sequences, num, gap, left, *products),) = database.ask(query).rows
        if num and gap:
            interval = removed_interval(num_sequences, gap, left, *products)
            found.append(_settled(name.removeprefix(REPLAY_PREFIX), pair, int(num), gap / num, left / num, interval))
    return tuple(sorted(found, key=lambda each: -each.removed))


def removed_interval(
    num_sequences: int, gap: float, left: float, gap2: float, left2: float, gap_left: float
) -> Interval | None:
    """A 95 % interval of 1 - left / gap, from sums over sequences and over the squares and products of what each adds.

    The variance is that of a ratio of two sums over sequences, by linearisation (Cochran 1977, Sampling Techniques, ch. 6):
    n / (n - 1) sum (left_i - R gap_i)^2 / gap^2, R = left / gap; the reach is Student's, of n - 1 degrees of freedom. No more
    than all can be removed. None with fewer than two sequences.

    Two sequences with a gap of 1 each, of which a replay leaves all of one and nothing of the other:

    >>> low, high = removed_interval(2, 2.0, 1.0, 2.0, 1.0, 1.0)
    >>> low < 0.5 - 0.5 * 1.96 and high == 1.0
    True
    """
    if num_sequences < 2:
        return None
    ratio = left / gap
    # Rounding may make a sum of squares negative.
    squares = max(left2 - 2 * ratio * gap_left + ratio * ratio * gap2, 0.0)
    error = (num_sequences / (num_sequences - 1) * squares) ** 0.5 / gap
    reach = student_quantile((1 + _CONFIDENCE) / 2, num_sequences - 1) * error
    return 1 - ratio - reach, min(1 - ratio + reach, 1.0)


def _settled(arm: str, pair: Pair, num: int, gap: float, left: float, interval: Interval | None) -> Settled:
    removed = 1 - left / gap
    if removed > _SETTLES:
        sentence = f"with {arm}, {pair[0]} would agree with {pair[1]}: it is what makes the gap"
    elif removed > _ADDS_LITTLE:
        sentence = f"{arm} makes a part of the gap"
    elif removed > -_ADDS_LITTLE:
        sentence = f"{arm} does not make the gap"
    else:
        sentence = f"{arm} would make the gap larger"
    low, high = interval or (None, None)
    return Settled(
        arm=arm, num_tokens=num, gap_rms=gap**0.5, left_rms=left**0.5, removed=removed, low=low, high=high,
        sentence=sentence,
    )  # fmt: skip
