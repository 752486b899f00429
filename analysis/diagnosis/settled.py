"""What the replays that a trace holds have settled."""

from __future__ import annotations

from ...schemas.passes import REPLAY_PREFIX
from ..database import Database, quoted
from ..source import Pair
from .diagnosis import Settled

_SETTLES = 0.9
"""Share of the gap that a replay must remove to have settled its cause."""
_ADDS_LITTLE = 0.1


def settled(database: Database, pair: Pair, passes: list[str]) -> tuple[Settled, ...]:
    """Every replay, put in the place of pass a: those that remove most of the gap first."""
    found = []
    database.define("triangle")
    for name in passes:
        if not name.startswith(REPLAY_PREFIX) or name in pair:
            continue
        query = f"""
            SELECT count(*), avg((logprob_a - logprob_b) ** 2), avg((logprob_c - logprob_b) ** 2)
            FROM triangle({quoted(pair[0])}, {quoted(pair[1])}, {quoted(name)})
        """
        ((num, gap, left),) = database.ask(query).rows
        if num and gap:
            found.append(_settled(name.removeprefix(REPLAY_PREFIX), pair, num, gap, left))
    return tuple(sorted(found, key=lambda each: -each.removed))


def _settled(arm: str, pair: Pair, num: int, gap: float, left: float) -> Settled:
    removed = 1 - left / gap
    if removed > _SETTLES:
        sentence = f"with {arm}, {pair[0]} would agree with {pair[1]}: it is what makes the gap"
    elif removed > _ADDS_LITTLE:
        sentence = f"{arm} makes a part of the gap"
    elif removed > -_ADDS_LITTLE:
        sentence = f"{arm} does not make the gap"
    else:
        sentence = f"{arm} would make the gap larger"
    return Settled(arm=arm, num_tokens=num, gap_rms=gap**0.5, left_rms=left**0.5, removed=removed, sentence=sentence)
