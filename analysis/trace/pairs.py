"""Parse the names of two passes, and explain why two passes cannot be compared."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ...schemas.errors import InvalidOption, option, tell_samples
from ...schemas.layout import WEIGHTS
from ...schemas.passes import REPLAY_PREFIX, ROLLOUT, first_pair

if TYPE_CHECKING:
    from .database import Database
    from .source import Pair


def parse_pair(text: str) -> Pair:
    """Return the two pass names in `a:b`."""
    a, colon, b = text.partition(":")
    if not (a and colon and b) or ":" in b:
        raise InvalidOption(f"got {text!r}; write two passes as a:b, e.g. train:rollout", option="pair")
    return a, b


def num_scored(database: Database) -> dict[str, int]:
    """Return pass -> number of score rows with logprobs, for passes that have any."""
    query = 'SELECT "pass", count(logprobs) FROM scores GROUP BY "pass" HAVING count(logprobs) > 0 ORDER BY "pass"'
    return dict(database.connection.execute(query).fetchall())


def why_nothing(database: Database, pair: Pair) -> str:
    """Return an explanation of which pass is missing, and what can be compared instead."""
    counts = num_scored(database)
    where = ", ".join(source.run for source in database.sources)
    lacking = [name for name in pair if name not in counts]
    if lacking:
        problem = f"has no logprobs of pass {' and '.join(repr(name) for name in lacking)}{_note(database, lacking)}"
    else:
        problem = f"has no token with a logprob in both {pair[0]!r} and {pair[1]!r}{_note(database, list(pair))}"
    others = list(counts)
    if (shown := first_pair(others)) is not None:
        return f"{where}: {problem}; compare two of: {', '.join(others)}, e.g. with {option('pair', shown)}"
    if others:
        return f"{where}: {problem}; the only pass with logprobs is {others[0]!r}{_replay_gives(database, others[0])}"
    if database.kept_steps:
        return f"{where}: {problem}; {option('steps', database.steps)} selects steps without any score"
    return f"{where}: {problem}; the trace has no scores at all"


def _replay_gives(database: Database, name: str) -> str:
    """Return advice to replay an engine's tokens; empty unless one trace has rollout scores only, and tokens."""
    if len(database.sources) != 1 or name != ROLLOUT:
        return ""
    (counts,) = database.connection.execute(
        "SELECT sum(num_prompt_tokens), sum(num_response_tokens) FROM sequences"
    ).fetchall()
    if not all(counts):
        return ""
    store = database.sources[0].store
    trace = shlex.quote(store.url)
    attach = "" if store.exists(WEIGHTS) else f"`tim-trace weights {trace} --attach VERSION DIR` and "
    return (
        f". {attach}`tim-trace replay {trace}` score the same tokens with the weights, and "
        f"{option('pair', f'{REPLAY_PREFIX}as-recorded:{name}')} compares the two"
    )


def _note(database: Database, passes: list[str]) -> str:
    """Return the note in the contract of a pass without scores or logprobs, in parentheses; empty if there is none."""
    for name in passes:
        rows = database.connection.execute(
            "SELECT max(json_extract_string(contract_json, '$.logprobs_note')) FROM passes WHERE \"pass\" = ?", [name]
        ).fetchall()
        if rows and rows[0][0]:
            return f" ({rows[0][0]})"
    return ""


_SAMPLED = """SELECT DISTINCT "pass" FROM passes WHERE json_extract(contract_json, '$.sample') IS NOT NULL ORDER BY 1"""

_COUNTS = """
    WITH own AS (SELECT DISTINCT run, step, seq_id FROM scores WHERE "pass" = $name)
    SELECT (SELECT count(*) FROM own), count(*) FROM (
        SELECT DISTINCT run, step, seq_id FROM scores
        WHERE "pass" = 'train' AND (run, step) IN (SELECT (run, step) FROM own)
    )
"""


def sampled_passes(database: Database) -> dict[str, tuple[int, int]]:
    """Return pass of a sampled replay -> its number of sequences, and that of `train` in the same steps. Replays that
    cover all sequences are omitted.
    """
    names = [name for (name,) in database.connection.execute(_SAMPLED).fetchall()]
    counts = {name: database.connection.execute(_COUNTS, {"name": name}).fetchall()[0] for name in names}
    return {name: found for name, found in counts.items() if found[0] < found[1]}


def sample_sentence(number: int, total: int) -> str:
    """Return a phrase saying how many of the sequences in its steps a sampled pass contains."""
    return f"a sample: {number:,} of {total:,} sequences in its steps"


def tell_sampled(database: Database, names: Iterable[str]) -> None:
    """Warn if any of the compared passes contains only a sample of the sequences."""
    asked = {name for name in names if name.startswith(REPLAY_PREFIX)}
    if asked:
        found = sampled_passes(database)
        tell_samples(f"{name} is {sample_sentence(*found[name])}" for name in sorted(asked & found.keys()))
