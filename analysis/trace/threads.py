"""Work of several threads at once."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from typing import TypeVar

Item = TypeVar("Item")
Made = TypeVar("Made")

_most: list[int] = []
"""The limit, where there is one."""


def limit_threads(most: int) -> None:
    """Let readings of this process use so many threads at most."""
    _most[:] = [most]


def num_threads() -> int:
    """Threads of a reading: as many as there are cores, unless they were limited."""
    return min([os.cpu_count() or 1, *_most])


def is_limited() -> bool:
    """Whether they were."""
    return bool(_most)


def mapped(pool: Executor, function: Callable[[Item], Made], items: Iterable[Item]) -> Iterator[Made]:
    """Results of a function, in the order of its items; a few items are taken ahead, not all of them."""
    waiting: deque[Future[Made]] = deque()
    for item in items:
        waiting.append(pool.submit(function, item))
        if len(waiting) > 2 * num_threads():
            yield waiting.popleft().result()
    for future in waiting:
        yield future.result()
