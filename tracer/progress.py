"""Progress reporting for long computations; only the command line displays it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

Advance = Callable[[int], None]
"""Takes the number of units completed since the last call."""

Progress = Callable[[str, int], AbstractContextManager[Advance]]
"""Starts a progress display, given a description and the total number of units."""


def unheard(units: int) -> None:
    """Ignore progress."""


@contextmanager
def no_progress(what: str, total: int) -> Iterator[Advance]:
    yield unheard
