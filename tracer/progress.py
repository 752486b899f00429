"""Telling how far long work has come. Computing takes a Progress; only the command line draws one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

Advance = Callable[[int], None]
"""Called with the number of units done since the last call."""

Progress = Callable[[str, int], AbstractContextManager[Advance]]
"""Called with what is done and the number of units in all."""


@contextmanager
def no_progress(what: str, total: int) -> Iterator[Advance]:
    """Tell nobody."""
    yield lambda units: None
