from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass
from importlib.resources import files

from ...schemas.errors import InvalidOption, NothingToCompare
from ...schemas.steps import ALL_STEPS
from ..rows import Rows
from ..trace.columns import num_scored, parse_pair, why_nothing
from ..trace.database import Database
from ..trace.limits import limited, set_memory
from ..trace.macros import quoted_pair
from ..trace.source import Pair, Traces
from ..views import open_database

_PAIR = "'train', 'rollout'"
"""The two passes as written in the SQL files. `NamedQuery.over` replaces them with other passes."""
_FIELD = re.compile(r"-- (?P<name>Unit|Needs|Source|Meaning): (?P<text>.*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedQuery:
    name: str
    summary: str
    unit: str
    source: str
    """Publication or code that the formula comes from."""
    meaning: str
    """How to interpret the result."""
    needs: str | None
    """Data that the query needs besides the logprobs of both passes, or None."""
    sql: str
    """SQL for the passes train and rollout."""

    def over(self, a: str, b: str) -> str:
        return self.sql.replace(_PAIR, quoted_pair((a, b)))


def catalogue() -> list[NamedQuery]:
    folder = files(__package__)
    names = sorted(entry.name.removesuffix(".sql") for entry in folder.iterdir() if entry.name.endswith(".sql"))
    return [_parse(name, (folder / f"{name}.sql").read_text(encoding="utf-8")) for name in names]


def named_query(name: str) -> NamedQuery:
    known = {query.name: query for query in catalogue()}
    if name not in known:
        near = [other for other in known if other.startswith(name)] or difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else "tim-trace query lists them"
        if os.path.isdir(name):
            hint = f"{name} is a folder; put a query's name first, e.g. tim-trace query worst-tokens {name}"
        raise InvalidOption(f"unknown query {name!r}; {hint}", option="query")
    return known[name]


def query(
    name: str, traces: Traces | Database, *, pair: str = "train:rollout", steps: str = ALL_STEPS,
    timeout: float | None = None, memory: str | None = None,
) -> Rows:  # fmt: skip
    """List the named queries, or run a query on one or more traces.

    `pair` is a:b, and d = logprob(a) - logprob(b) in nats. `steps` (3:80, -10:, 2:200:2) selects steps. `timeout` and `memory` work as in `sql`. Raises
    InvalidOption for an unknown name, NothingToCompare if no token has the data that the query needs, InvalidQuery if
    the query exceeds a limit, TraceNotFound, NewerTrace or DamagedTrace.
    """
    chosen, names, database = named_query(name), parse_pair(pair), open_database(traces, steps)
    if memory is not None:
        set_memory(database.connection.raw, memory)
    with limited(database.connection.raw, timeout, memory):
        rows = database.ask(chosen.over(*names))
    if not len(rows):
        raise NothingToCompare(_why_none(database, chosen, names))
    return rows


def _why_none(database: Database, chosen: NamedQuery, names: Pair) -> str:
    if chosen.needs is None or not {*names} <= num_scored(database).keys():
        return why_nothing(database, names)
    where = ", ".join(source.run for source in database.sources)
    return f"{where}: query {chosen.name} needs {chosen.needs}; not recorded for {names[0]} and {names[1]}"


def listed() -> Rows:
    return Rows(("query", "result"), [(each.name, each.summary) for each in catalogue()])


def _parse(name: str, text: str) -> NamedQuery:
    fields: dict[str, list[str]] = {}
    field = "summary"
    for line in text.splitlines():
        if line.startswith("--"):  # a line without a field name continues the previous field
            found = _FIELD.fullmatch(line)
            field = found["name"].lower() if found else field
            fields.setdefault(field, []).append(found["text"] if found else line.removeprefix("--").strip())
    told = {field: " ".join(lines) for field, lines in fields.items()}
    return NamedQuery(
        name=name, meaning=told["meaning"], needs=told.get("needs", "").rstrip(".") or None, sql=text,
        **{field: told[field].rstrip(".") for field in ("summary", "unit", "source")},
    )  # fmt: skip
