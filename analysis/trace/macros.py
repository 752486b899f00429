"""The macros of SQL: a catalogue of the names that files define, and of the order in which files are defined."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
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
"""Words of queries that list tables, views and macros: every file that is listed is defined before them."""


@dataclass(frozen=True, kw_only=True)
class MacroFile(Generic[Owner]):
    """SQL that defines macros and views, offered by one feature."""

    name: str
    sql: str
    """Its text, in which the names are found that it defines and those that it needs."""
    define: Callable[[Owner], object]
    """Makes them known to the connection of a database."""
    functions: tuple[str, ...] = ()
    """Functions in Python and tables that `define` makes known, too."""
    is_listed: bool = True
    """Whether a query that lists macros shows these."""

    @cached_property
    def names(self) -> frozenset[str]:
        """Names that it defines, in lower case."""
        return frozenset(name.lower() for name in (*_DEFINED.findall(self.sql), *self.functions))

    @cached_property
    def calls(self) -> frozenset[str]:
        """Names that its text calls or selects from, in lower case."""
        found = _CALLED.findall(_COMMENT.sub("", self.sql).lower())
        return frozenset(called or selected for called, selected in found)


class Catalogue(Generic[Owner]):
    """Name of a macro, view or function -> the files that a query with this name needs."""

    def __init__(self, offered: Iterable[MacroFile[Owner]]):
        by_name = {file.name: file for file in offered}
        needs = {
            name: {other.name for other in by_name.values() if other is not file and other.names & file.calls}
            for name, file in by_name.items()
        }
        self._files = [by_name[name] for name in TopologicalSorter(needs).static_order()]
        every: dict[str, set[str]] = {}
        for file in self._files:  # those that it needs come before it
            every[file.name] = {file.name}.union(*(every[need] for need in needs[file.name]))
        self._needed = dict.fromkeys(
            LISTING, set().union(*(every[file.name] for file in self._files if file.is_listed))
        )
        for file in self._files:
            for word in file.names:
                self._needed[word] = self._needed.get(word, set()) | every[file.name]

    def needed(self, words: frozenset[str]) -> list[MacroFile[Owner]]:
        """Files that a query of these words needs, each after those that it needs itself."""
        names = set().union(*(self._needed[word] for word in words & self._needed.keys()))
        return [file for file in self._files if file.name in names] if names else []


@cache
def sql_file(name: str) -> str:
    """Read one of the .sql files of analysis."""
    return (files("tim_trace.analysis.sql") / f"{name}.sql").read_text(encoding="utf-8")


def statistics_of_groups(rows: str) -> str:
    """SQL of the statistics of groups of sequences, from a query of rows as group_statistics.sql says."""
    return sql_file("group_statistics").format(rows=rows)


def words_of(query: str) -> frozenset[str]:
    """Words of a query, in lower case."""
    return frozenset(_WORD.findall(query.lower()))
