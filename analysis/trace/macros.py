"""Find the SQL files that define a query's macros, and write SQL literals and types."""

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
"""Words that list tables, views or macros. All SQL files must run before a query that contains one of these words."""


@dataclass(frozen=True, kw_only=True)
class MacroFile(Generic[Owner]):
    name: str
    sql: str = ""
    register: Callable[[Owner], object] | None = None
    define: Callable[[Owner], object] | None = None
    functions: tuple[str, ...] = ()
    is_listed: bool = True

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset(name.lower() for name in (*_DEFINED.findall(self.sql), *self.functions))

    @cached_property
    def calls(self) -> frozenset[str]:
        found = _CALLED.findall(_COMMENT.sub("", self.sql).lower())
        return frozenset(called or selected for called, selected in found)


class Catalogue(Generic[Owner]):
    def __init__(self, offered: Iterable[MacroFile[Owner]]):
        by_name = {file.name: file for file in offered}
        needs = {
            name: {other.name for other in by_name.values() if other is not file and other.names & file.calls}
            for name, file in by_name.items()
        }
        self._files = [by_name[name] for name in TopologicalSorter(needs).static_order()]
        every: dict[str, set[str]] = {}
        for file in self._files:  # dependencies come first
            every[file.name] = {file.name}.union(*(every[need] for need in needs[file.name]))
        self._needed = dict.fromkeys(
            LISTING, set().union(*(every[file.name] for file in self._files if file.is_listed))
        )
        for file in self._files:
            for word in file.names:
                self._needed[word] = self._needed.get(word, set()) | every[file.name]

    def needed(self, words: frozenset[str]) -> list[MacroFile[Owner]]:
        """Return the SQL files to run before a query that contains these words, dependencies first."""
        names = set().union(*(self._needed[word] for word in words & self._needed.keys()))
        return [file for file in self._files if file.name in names] if names else []


@cache
def sql_file(name: str) -> str:
    return (files("tim_trace.analysis.sql") / f"{name}.sql").read_text(encoding="utf-8")


def words_of(query: str) -> frozenset[str]:
    return frozenset(_WORD.findall(query.lower()))


def quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def quoted_pair(pair: tuple[str, str]) -> str:
    return f"{quoted(pair[0])}, {quoted(pair[1])}"


def struct_sql(types: Mapping[str, str]) -> str:
    """Return a struct's SQL type.

    >>> struct_sql({"num": "BIGINT", "mean": "DOUBLE"})
    'STRUCT(num BIGINT, mean DOUBLE)'
    """
    return f"STRUCT({', '.join(f'{name} {kind}' for name, kind in types.items())})"
