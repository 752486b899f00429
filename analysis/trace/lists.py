"""List columns as they come from DuckDB, for NumPy: their values end to end, and batches of them by several threads."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from typing import Any

import numpy as np
import pyarrow as pa


def mapped(pool: Executor, function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
    """What a function makes of items, in their order; a few are taken ahead, not all of them."""
    waiting: deque[Any] = deque()
    for item in items:
        waiting.append(pool.submit(function, item))
        if len(waiting) > 2 * (os.cpu_count() or 1):
            yield waiting.popleft().result()
    for future in waiting:
        yield future.result()


def flat(lists: Any) -> tuple[Any, np.ndarray]:
    """The values of lists end to end, and how many each list has."""
    whole = lists.combine_chunks() if isinstance(lists, pa.ChunkedArray) else lists
    return whole.flatten(), np.diff(whole.offsets.to_numpy()).astype(np.int64)


def first(lengths: np.ndarray, kept: np.ndarray) -> pa.Array:
    """bool: whether a value is among the first `kept` of its list."""
    position = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return pa.array(position < np.repeat(kept, lengths))


def counted(mask: Any, lengths: np.ndarray) -> np.ndarray:
    """bool [T]: whether the loss counts a token."""
    values, known = flat(mask)
    there = np.repeat(known == 0, lengths)
    if len(values):
        shortest = np.minimum(known, lengths)
        inside = first(lengths, shortest).to_numpy(zero_copy_only=False)
        there[inside] = values.filter(first(known, shortest)).fill_null(False).to_numpy(zero_copy_only=False)
    return there
