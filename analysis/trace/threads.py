"""Work of several threads at once."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from typing import TypeVar

Item = TypeVar("Item")
Made = TypeVar("Made")


def mapped(pool: Executor, function: Callable[[Item], Made], items: Iterable[Item]) -> Iterator[Made]:
    """Results of a function, in the order of its items; a few items are taken ahead, not all of them."""
    waiting: deque[Future[Made]] = deque()
    for item in items:
        waiting.append(pool.submit(function, item))
        if len(waiting) > 2 * (os.cpu_count() or 1):
            yield waiting.popleft().result()
    for future in waiting:
        yield future.result()
