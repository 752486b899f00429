"""Progress reporting for long computations; only the command line displays it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

Advance = Callable[[int], None]
"""Called with the number of units completed since the last call."""

Progress = Callable[[str, int], AbstractContextManager[Advance]]
"""Called with a description and the total number of units."""


@contextmanager
def no_progress(what: str, total: int) -> Iterator[Advance]:
    """Report nothing."""
    yield lambda units: None
