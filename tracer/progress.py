"""Reporting progress of long work. Computations take a Progress; only the command line draws one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

Advance = Callable[[int], None]
"""Called with the number of units done since the last call."""

Progress = Callable[[str, int], AbstractContextManager[Advance]]
"""Called with a name of the work and the total number of units."""


@contextmanager
def no_progress(what: str, total: int) -> Iterator[Advance]:
    """Report nothing."""
    yield lambda units: None
