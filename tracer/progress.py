"""Progress reporting for long computations. Only the command line displays it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

Advance = Callable[[int], None]
"""Function that takes the number of units completed since the last call."""

Progress = Callable[[str, int], AbstractContextManager[Advance]]
"""Function of a description and the total number of units. Returns a context manager that yields an `Advance`."""


def unheard(units: int) -> None:
    pass


@contextmanager
def no_progress(what: str, total: int) -> Iterator[Advance]:
    yield unheard
