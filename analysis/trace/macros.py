"""Catalogue the SQL macros: names that each file defines, and the order of files; SQL literals and types."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from graphlib import TopologicalSorter
from importlib.resources import files
from typing import Generic, TypeVar

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
