"""Chosen sequences of a trace, token by token: the worst, typical and random ones, and the worst of each step."""

from __future__ import annotations

from collections.abc import Sequence

from ...schemas.errors import InvalidOption
from ...schemas.passes import CURRENT, REFERENCE
from ..trace.database import Database
from ..trace.quoting import quoted
from ..trace.source import Pair, Source
from .bias import read_bias
from .choice import Wanted, choose, told
from .reading import read_chosen
from .sequence_mismatch import read_sequence_mismatch
from .steps import look_at
from .token_sample import TokenSamples
from .token_text import read_token_text


def read_token_samples(
    database: Database,
    pair: Pair = ("train", "rollout"),
    *,
    run: str | None = None,
    notable: Sequence[int] = (),
    worst: int = 24,
    random: int = 16,
    typical: int = 8,
    per_step: int = 1,
    max_steps: int = 200,
    max_tokens: int = 200_000,
    max_sequence_tokens: int = 2_000,
) -> TokenSamples:
    """Choose sequences of a run and read their tokens, with d = logprob(a) - logprob(b) of the pair, nats.

    Worst are those with the largest |d| of one token, typical those whose mean |d| is nearest to the median, random ones
    are the same every time; `per_step` adds the worst of each of at most `max_steps` steps. A large run is looked at in
    part (see steps.look_at), `notable` steps first. At most `max_tokens` of prompts and responses are shown: whole
    sequences are left out for that, of the last sorts first; and of a longer response `max_sequence_tokens` around its
    worst token. `run` names one of several traces; None is the first. `choice` of the result says all of this with numbers.

    A trace with one pass of the pair is shown without d, and an empty one has no sequences. Raises InvalidOption, or
    DamagedTrace and its kin.
    """
    wanted = Wanted(
        worst=worst, random=random, typical=typical, per_step=per_step, max_steps=max_steps, max_tokens=max_tokens,
        max_sequence_tokens=max_sequence_tokens,
    )  # fmt: skip
    _check(wanted)
    source = _source(database, run)
    scored = _scored(database, source.run, [*pair, CURRENT, REFERENCE])
    lacking = tuple(name for name in pair if name not in scored)
    looked = look_at(database, pair, source.run, notable, worst)
    gaps = read_sequence_mismatch(database, pair, source.run, looked.steps, compares=not lacking)
    choice = choose(gaps, looked, wanted)
    text, bias = read_token_text(source), read_bias(database, source.run)
    found = read_chosen(
        database, source.run, gaps, choice, pair=pair, passes=scored, bias=bias, text=text,
        max_sequence_tokens=max_sequence_tokens,
    )  # fmt: skip
    return TokenSamples(
        sequences=tuple(found), choice=told(choice, gaps, looked, wanted, pair, lacking), text_from=text.told,
        bias_from=bias.told, passes=tuple(scored),
    )  # fmt: skip


def _check(wanted: Wanted) -> None:
    for name, least in (
        ("worst", 0), ("random", 0), ("typical", 0), ("per_step", 0), ("max_steps", 0), ("max_tokens", 1),
        ("max_sequence_tokens", 1),
    ):  # fmt: skip
        if (value := getattr(wanted, name)) < least:
            raise InvalidOption(f"got {value}; give a number of at least {least}", option=name)


def _source(database: Database, run: str | None) -> Source:
    sources = {source.run: source for source in database.sources}
    if run is None:
        return database.sources[0]
    if run not in sources:
        raise InvalidOption(f"there is none called {run!r}; use {', '.join(sources)}", option="run")
    return sources[run]


def _scored(database: Database, run: str, names: Sequence[str]) -> list[str]:
    """Those passes that scored anything; it reads no list."""
    query = f'SELECT DISTINCT "pass" FROM scores WHERE run = {quoted(run)} AND iteration = 0'
    found = {name for (name,) in database.connection.execute(query).fetchall()}
    return [name for name in dict.fromkeys(names) if name in found]
