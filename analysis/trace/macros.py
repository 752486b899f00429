"""Catalogue the SQL macros: names that each file defines, and the order of files; SQL literals and types. Parse the names
of the two passes that macros compare, and explain why two passes cannot be compared.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from graphlib import TopologicalSorter
from importlib.resources import files
from typing import TYPE_CHECKING, Generic, TypeVar

from ...schemas.errors import InvalidOption, option, tell_samples
from ...schemas.layout import WEIGHTS
from ...schemas.passes import REPLAY_PREFIX, ROLLOUT, first_pair

if TYPE_CHECKING:
    from .database import Database
    from .source import Pair

Owner = TypeVar("Owner")

_DEFINED = re.compile(r"\b(?:MACRO|VIEW)\s+(\w+)", re.IGNORECASE)
_COMMENT = re.compile(r"--.*")
_CALLED = re.compile(r"\b(\w+)\s*\(|\b(?:from|join)\s+(\w+)")
_WORD = re.compile(r"[a-z_]\w*")
LISTING = frozenset({"show", "describe", "information_schema", "duckdb_functions", "duckdb_views"})
"""Words in queries that list tables, views or macros; every listed file is defined before such a query runs."""


@dataclass(frozen=True, kw_only=True)
class MacroFile(Generic[Owner]):
    """An SQL file that defines macros and views for one feature."""

    name: str
    sql: str
    """The SQL text; the names that the file defines and uses are found in it."""
    register: Callable[[Owner], object] | None = None
    """Function that registers the `functions` on the connection of a database before the SQL is run."""
    define: Callable[[Owner], object] | None = None
    """Function that defines the macros in the place of the SQL as it is."""
    functions: tuple[str, ...] = ()
    """Names of the Python functions and tables that `register` or `define` registers."""
    is_listed: bool = True
    """True if queries that list macros include the macros of this file."""

    @cached_property
    def names(self) -> frozenset[str]:
        """Names defined in the file, in lower case."""
        return frozenset(name.lower() for name in (*_DEFINED.findall(self.sql), *self.functions))

    @cached_property
    def calls(self) -> frozenset[str]:
        """Names that the SQL text calls or selects from, in lower case."""
        found = _CALLED.findall(_COMMENT.sub("", self.sql).lower())
        return frozenset(called or selected for called, selected in found)


class Catalogue(Generic[Owner]):
    """Name of a macro, view or function -> the files that a query using the name needs."""

    def __init__(self, offered: Iterable[MacroFile[Owner]]):
        by_name = {file.name: file for file in offered}
        needs = {
            name: {other.name for other in by_name.values() if other is not file and other.names & file.calls}
            for name, file in by_name.items()
        }
        self._files = [by_name[name] for name in TopologicalSorter(needs).static_order()]
        every: dict[str, set[str]] = {}
        for file in self._files:  # dependencies precede the files that need them
            every[file.name] = {file.name}.union(*(every[need] for need in needs[file.name]))
        self._needed = dict.fromkeys(
            LISTING, set().union(*(every[file.name] for file in self._files if file.is_listed))
        )
        for file in self._files:
            for word in file.names:
                self._needed[word] = self._needed.get(word, set()) | every[file.name]

    def needed(self, words: frozenset[str]) -> list[MacroFile[Owner]]:
        """Return the files that define the macros used in a query, in dependency order, given the query's words."""
        names = set().union(*(self._needed[word] for word in words & self._needed.keys()))
        return [file for file in self._files if file.name in names] if names else []


@cache
def sql_file(name: str) -> str:
    """Read an SQL file of the analysis package by its name without `.sql`."""
    return (files("tim_trace.analysis.sql") / f"{name}.sql").read_text(encoding="utf-8")


def statistics_of_groups(rows: str) -> str:
    """Return SQL for the statistics of groups; `rows` is a query for the columns in group_statistics.sql."""
    return sql_file("group_statistics").format(rows=rows)


def words_of(query: str) -> frozenset[str]:
    return frozenset(_WORD.findall(query.lower()))


def quoted(text: str) -> str:
    """Return a text as an SQL string literal."""
    return "'" + text.replace("'", "''") + "'"


def quoted_pair(pair: tuple[str, str]) -> str:
    """Return the two passes of a pair as arguments for an SQL macro."""
    return f"{quoted(pair[0])}, {quoted(pair[1])}"


def struct_sql(types: Mapping[str, str]) -> str:
    """Return the SQL type of a struct, given field name -> SQL type.

    >>> struct_sql({"num": "BIGINT", "mean": "DOUBLE"})
    'STRUCT(num BIGINT, mean DOUBLE)'
    """
    return f"STRUCT({', '.join(f'{name} {kind}' for name, kind in types.items())})"


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
