"""Progress reporting for long computations; only the command line displays it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

Advance = Callable[[int], None]
"""Function that is called with the number of units completed since its last call."""

Progress = Callable[[str, int], AbstractContextManager[Advance]]
"""Function that starts a progress display; it takes a description and the total number of units."""


def unheard(units: int) -> None:
    """Ignore progress."""


@contextmanager
def no_progress(what: str, total: int) -> Iterator[Advance]:
    """Report nothing."""
    yield unheard
