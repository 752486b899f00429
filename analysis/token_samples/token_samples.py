"""Chosen sequences of a trace, token by token: the worst, typical and random ones, and the worst of each step."""

from __future__ import annotations

from collections.abc import Sequence

from ...schemas.passes import CURRENT, REFERENCE
from ..trace.database import Database
from ..trace.macros import quoted
from ..trace.source import Pair
from .choice import Wanted, choice_text, choose
from .reading import read_chosen
from .steps import look_at, read_sequence_mismatch
from .token_sample import TokenSamples
from .token_text import read_token_text

_WANTED = Wanted()


def read_token_samples(
    database: Database,
    pair: Pair = ("train", "rollout"),
    *,
    notable: Sequence[int] = (),
    wanted: Wanted = _WANTED,
) -> TokenSamples:
    """Choose sequences of a run and read their tokens, with d = logprob(a) - logprob(b) of the pair, nats.

    Worst sequences have the largest |d| of one token, typical ones a mean |d| closest to the median; random ones are the same
    in every call; and every step adds its own worst ones. In a large run only some steps are searched (see steps.look_at),
    `notable` steps first. Whole sequences are left out to limit the tokens shown, and a long response is cut around its worst
    token. `choice` of the result reports all of this with numbers.

    A trace with one pass of the pair is shown without d; an empty trace has no sequences. Raises DamagedTrace.
    """
    source = database.sources[0]
    scored = _scored(database, source.run, [*pair, CURRENT, REFERENCE])
    lacking = tuple(name for name in pair if name not in scored)
    looked = look_at(database, pair, source.run, notable, wanted.worst)
    gaps = read_sequence_mismatch(database, pair, source.run, looked.steps)
    choice = choose(gaps, looked, wanted)
    text = read_token_text(source)
    found = read_chosen(
        database, source.run, gaps, choice, pair=pair, passes=scored, text=text,
        max_sequence_tokens=wanted.max_sequence_tokens,
    )  # fmt: skip
    return TokenSamples(
        sequences=tuple(found), choice=choice_text(choice, gaps, looked, wanted, pair, lacking), text_from=text.told,
        passes=tuple(scored),
    )  # fmt: skip


def _scored(database: Database, run: str, names: Sequence[str]) -> list[str]:
    """Return the passes that have scores, without reading their lists."""
    query = f'SELECT DISTINCT "pass" FROM scores WHERE run = {quoted(run)} AND iteration = 0'
    found = {name for (name,) in database.connection.execute(query).fetchall()}
    return [name for name in dict.fromkeys(names) if name in found]
