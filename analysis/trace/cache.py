"""Readings of a database that several questions put to it, done once."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from .database import Database

Asked = ParamSpec("Asked")
Found = TypeVar("Found")


def cached(
    read: Callable[Concatenate[Database, Asked], Found],
) -> Callable[Concatenate[Database, Asked], Found]:
    """Let a reading of a database be done once for each set of arguments, for as long as the database is open.

    What is found belongs to all who ask: none may change it. Arguments must be hashable.
    """

    @wraps(read)
    def known(database: Database, /, *args: Asked.args, **options: Asked.kwargs) -> Found:
        key = (read.__module__, read.__qualname__, args, tuple(sorted(options.items())))
        if key not in database.memory:
            database.memory[key] = read(database, *args, **options)
        found: Found = database.memory[key]
        return found

    return known
