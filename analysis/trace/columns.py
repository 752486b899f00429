"""Find out what a trace contains: optional columns, passes, hyperparameters, contracts and training attempts."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...schemas.documents import WriterState
from ...schemas.errors import InvalidOption, option, tell_samples
from ...schemas.layout import HYPERPARAMETER, WEIGHTS
from ...schemas.passes import CURRENT, REPLAY_PREFIX, ROLLOUT, TRAIN, first_pair
from .database import Database, cached
from .macros import quoted
from .source import Pair


class OptionalColumns(NamedTuple):
    mask: bool
    advantage: bool
    advantages: bool


def sequence_columns(database: Database, run: str | None = None) -> OptionalColumns:
    names = ("response_mask", "advantage", "advantages")
    return OptionalColumns(*(_has(database, "sequences", name, run) for name in names))


@cached
def writer_states(database: Database) -> list[WriterState]:
    """Return the readable states of every trace's writers."""
    return [state for source in database.sources for state in source.store.writers()[0]]


def passes_with(
    database: Database, column: str, run: str | None = None, *, of: Sequence[str] | None = None, first_use: bool = False
) -> frozenset[str]:
    names = scored_passes(database) if of is None else of
    return frozenset(name for name in names if _has(database, "scores", column, run, name, first_use))


@cached
def scored_passes(database: Database) -> list[str]:
    return [name for (name,) in database.connection.execute('SELECT DISTINCT "pass" FROM scores ORDER BY 1').fetchall()]


@cached
def _has(
    database: Database, table: str, column: str, run: str | None, pass_name: str | None = None, first_use: bool = False
) -> bool:
    terms = [f"{column} IS NOT NULL"]
    if run is not None:
        terms.append(f"run = {quoted(run)}")
    if pass_name is not None:
        terms.append(f'"pass" = {quoted(pass_name)}')
    if first_use:
        terms.append("iteration = 0")
    query = f"SELECT step FROM {table} WHERE {' AND '.join(terms)} LIMIT 1"
    return bool(database.connection.execute(query).fetchall())


def flat_contract(contract: object, path: str = "") -> dict[str, str]:
    """Flatten a contract into a dict that maps dotted paths, e.g. `model.attention`, to text values. Lists are not
    split."""
    if isinstance(contract, dict) and contract:
        found: dict[str, str] = {}
        for name, part in contract.items():
            found |= flat_contract(part, f"{path}.{name}" if path else str(name))
        return found
    return {path: field_text(contract)} if path else {}


def field_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def read_hyperparameters(database: Database, run: str | None = None) -> dict[str, float | str]:
    """Return each hyperparameter's last value in one run, or in all runs. The prefix
    `hyperparameter/` is removed from the names."""
    query = """
        SELECT name, value, text FROM metrics
        WHERE step = 0 AND starts_with(name, $prefix) AND ($run IS NULL OR run = $run)
        ORDER BY logged_at
    """
    rows = database.connection.execute(query, {"prefix": HYPERPARAMETER, "run": run}).fetchall()
    return {name.removeprefix(HYPERPARAMETER): text if value is None else value for name, value, text in rows}


def parse_pair(text: str) -> Pair:
    a, colon, b = text.partition(":")
    if not (a and colon and b) or ":" in b:
        raise InvalidOption(f"got {text!r}; give two passes as a:b, e.g. train:rollout", option="pair")
    return a, b


def num_scored(database: Database) -> dict[str, int]:
    query = 'SELECT "pass", count(logprobs) FROM scores GROUP BY "pass" HAVING count(logprobs) > 0 ORDER BY "pass"'
    return dict(database.connection.execute(query).fetchall())


_SCALARS_ALONE = """
SELECT NOT EXISTS (FROM sequences) AND EXISTS (FROM metrics WHERE NOT starts_with(name, 'hyperparameter/'))
"""


def has_only_other_passes(database: Database, pair: Pair) -> bool:
    """Return True if neither pass of the pair has logprobs, but at least two other passes do, e.g. from several
    engines."""
    counts = num_scored(database)
    return len(database.sources) == 1 and len(counts) > 1 and not {*pair} & {*counts}


def has_versions_of_current(database: Database) -> bool:
    """Return True if `current` and `train` have logprobs and policy versions, and `rollout` has no logprobs."""
    counts = num_scored(database)
    if not {CURRENT, TRAIN} <= counts.keys() or ROLLOUT in counts:
        return False
    query = """
        SELECT count(*) FROM scores
        WHERE "pass" IN ('current', 'train') AND logprobs IS NOT NULL AND policy_version IS NULL
    """
    return database.connection.execute(query).fetchall() == [(0,)]


def masks_everything(database: Database) -> bool:
    """Return True if loss masks were recorded but leave out every token."""
    query = (
        "SELECT count(response_mask) > 0 AND NOT coalesce(bool_or(list_bool_or(response_mask)), false) FROM sequences"
    )
    return sequence_columns(database).mask and database.connection.execute(query).fetchall() == [(True,)]


def why_nothing(database: Database, pair: Pair) -> str:
    counts = num_scored(database)
    where = ", ".join(source.run for source in database.sources)
    if masks_everything(database):
        return f"{where} has no token in the loss: response_mask is false for every token, so nothing is learned"
    if not database.kept_steps and database.connection.execute(_SCALARS_ALONE).fetchall() == [(True,)]:
        return (
            f"{where} has logged scalars but no tokens; record the run with tim-trace record, or import a dump with logprobs "
            "(tim-trace import auto)"
        )
    lacking = [name for name in pair if name not in counts]
    if lacking:
        problem = f"has no logprobs from pass {' and '.join(repr(name) for name in lacking)}{_note(database, lacking)}"
    else:
        problem = f"has no token with a logprob in both {pair[0]!r} and {pair[1]!r}{_note(database, list(pair))}"
    others = list(counts)
    if len(others) > 3 and len(database.sources) == 1:
        trace = shlex.quote(database.sources[0].store.url)
        return f"{where} {problem}; `tim-trace compare {trace}` compares all {len(others)} passes with logprobs"
    if (shown := first_pair(others)) is not None:
        return f"{where} {problem}; compare two of {', '.join(others)}, e.g. with {option('pair', shown)}"
    if others:
        return f"{where} {problem}; the only pass with logprobs is {others[0]!r}{_replay_gives(database, others[0])}"
    if database.kept_steps:
        return f"{where} {problem}; {option('steps', database.steps)} selects steps without scores"
    return f"{where} {problem}; the trace has no scores"


def _replay_gives(database: Database, name: str) -> str:
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
        f". To score the same tokens with the model's weights, run {attach}`tim-trace replay {trace}`; "
        f"{option('pair', f'{REPLAY_PREFIX}as-recorded:{name}')} compares the two"
    )


def _note(database: Database, passes: list[str]) -> str:
    query = "SELECT max(json_extract_string(contract_json, '$.logprobs_note')) FROM passes WHERE \"pass\" = ?"
    notes = [note for name in passes for (note,) in database.connection.execute(query, [name]).fetchall() if note]
    return f" ({notes[0]})" if notes else ""


def sampled_passes(database: Database) -> dict[str, tuple[int, int]]:
    query = (
        """SELECT DISTINCT "pass" FROM passes WHERE json_extract(contract_json, '$.sample') IS NOT NULL ORDER BY 1"""
    )
    names = [name for (name,) in database.connection.execute(query).fetchall()]
    query = """
        WITH own AS (SELECT DISTINCT run, step, seq_id FROM scores WHERE "pass" = $name)
        SELECT (SELECT count(*) FROM own), count(*) FROM (
            SELECT DISTINCT run, step, seq_id FROM scores
            WHERE "pass" = 'train' AND (run, step) IN (SELECT (run, step) FROM own)
        )
    """
    counts = {name: database.connection.execute(query, {"name": name}).fetchall()[0] for name in names}
    return {name: found for name, found in counts.items() if found[0] < found[1]}


def sample_sentence(number: int, total: int) -> str:
    return f"a sample: {number:,} of {total:,} sequences in its steps"


def tell_sampled(database: Database, names: Iterable[str]) -> None:
    asked = {name for name in names if name.startswith(REPLAY_PREFIX)}
    if asked:
        found = sampled_passes(database)
        tell_samples(f"{name} is {sample_sentence(*found[name])}" for name in sorted(asked & found.keys()))


# --- Training attempts of a resumed run


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptInfo:
    attempt: int
    first_step: int
    last_step: int
    num_sequences: int
    num_superseded: int
    superseded: tuple[tuple[int, int], ...] = ()


def attempts(database: Database) -> tuple[AttemptInfo, ...]:
    if not database.sources[0].newest:
        return ()
    query = """
        SELECT attempt, min(step) AS first_step, max(step) AS last_step, count(*) AS num_sequences,
               count(*) FILTER (attempt < newest) AS num_superseded,
               list_sort(list(DISTINCT step) FILTER (attempt < newest)) AS superseded
        FROM (SELECT step, attempt, max(attempt) OVER (PARTITION BY step) AS newest FROM all_sequences)
        WHERE attempt IS NOT NULL
        GROUP BY attempt
        ORDER BY attempt
    """
    rows = database.ask(query).dicts()
    return tuple(AttemptInfo(**row | {"superseded": _runs(row["superseded"] or [])}) for row in rows)


def _runs(steps: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return (first, last) for each range of consecutive steps.

    >>> _runs([1, 2, 3, 7, 9, 10])
    ((1, 3), (7, 7), (9, 10))
    """
    known = {*steps}
    lasts = (step for step in steps if step + 1 not in known)
    return tuple(zip((step for step in steps if step - 1 not in known), lasts, strict=True))


def steps_text(runs: Sequence[tuple[int, int]]) -> str:
    """Render step ranges.

    >>> steps_text([(1, 3), (7, 7)])
    '1 to 3, 7'
    """
    return ", ".join(f"{first}" if first == last else f"{first} to {last}" for first, last in runs)
