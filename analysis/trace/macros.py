"""The macros of SQL: each file of them is made known to a connection when a question first names what it defines."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property

_DEFINED = re.compile(r"\b(?:MACRO|VIEW)\s+(\w+)", re.IGNORECASE)
_COMMENT = re.compile(r"--.*")
_CALLED = re.compile(r"\b(\w+)\s*\(|\b(?:from|join)\s+(\w+)")
_WORD = re.compile(r"[a-z_]\w*")
_LISTING = {"show", "describe", "information_schema", "duckdb_functions", "duckdb_views"}
"""Words of questions that list what there is."""


@dataclass(frozen=True)
class MacroFile:
    """SQL that defines macros and views, and how it is made known."""

    sql: str
    """Its text, in which the names are found that it defines and those that it needs."""
    define: Callable[[], object]
    functions: tuple[str, ...] = ()
    """Functions in Python that `define` makes known, too."""
    is_listed: bool = True
    """Whether a question that lists what there is makes it known."""

    @cached_property
    def names(self) -> frozenset[str]:
        """What it defines, in small letters."""
        return _defined(self.sql) | {name.lower() for name in self.functions}

    @cached_property
    def calls(self) -> frozenset[str]:
        """What its text calls or selects from, in small letters."""
        return _called(self.sql)


class Macros:
    """Makes files of macros known as they are needed, those before them that they call themselves."""

    def __init__(self, files: Mapping[str, MacroFile]):
        self._files = files
        self._known: set[str] = set()

    def known(self, name: str) -> bool:
        """Whether a file was made known."""
        return name in self._known

    def define(self, name: str) -> None:
        """Make a file known, once, after those that it calls."""
        if name not in self._known:
            self.redefine(name, self._files[name].define)

    def redefine(self, name: str, define: Callable[[], object]) -> None:
        """Make a file known in another way than its own, in the place of what is known of it."""
        self._known.add(name)
        self.define_named(self._files[name].calls)
        define()

    def define_all(self) -> None:
        """Make known what a question lists that lists what there is."""
        self.define_named(frozenset(_LISTING))

    def define_named(self, words: frozenset[str]) -> None:
        """Make the files known whose macros are among the words of a question."""
        lists = bool(words & _LISTING)
        for name, file in self._files.items():
            if name not in self._known and (words & file.names or (lists and file.is_listed)):
                self.define(name)


@cache
def _defined(sql: str) -> frozenset[str]:
    return frozenset(name.lower() for name in _DEFINED.findall(sql))


@cache
def _called(sql: str) -> frozenset[str]:
    return frozenset(one or other for one, other in _CALLED.findall(_COMMENT.sub("", sql).lower()))


def words_of(query: str) -> frozenset[str]:
    """The words of a question, in small letters."""
    return frozenset(_WORD.findall(query.lower()))
