"""Two passes' logprobs as DuckDB hands them out, a list a sequence, made flat arrays, and blocks of these.

Shapes: T tokens of several sequences, one after the other; N sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from .lists import counted, first, flat

BATCH_ROWS = 1024
"""Sequences that are handed to a thread at once."""

_BLOCK_TOKENS = 1 << 16
"""Tokens that are worked on at once: few enough that the arrays stay in a core's cache."""


def counted_tokens(a: Any, b: Any, mask: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lists of float of two passes and lists of bool -> [T] a, [T] b, [N] how many tokens of each list they have.

    A token counts that the mask keeps, an empty one every token, and that has a value in both lists.
    """
    values_a, lengths = flat(a)
    values_b, lengths_b = flat(b)
    if not np.array_equal(lengths, lengths_b):
        shortest = np.minimum(lengths, lengths_b)
        values_a, values_b = values_a.filter(first(lengths, shortest)), values_b.filter(first(lengths_b, shortest))
        lengths = shortest
    there = counted(mask, lengths)
    for values in (values_a, values_b):
        if values.null_count:
            there &= values.is_valid().to_numpy(zero_copy_only=False)
    a_T, b_T = (values.to_numpy(zero_copy_only=False) for values in (values_a, values_b))
    if there.all():
        return a_T, b_T, lengths
    row = np.repeat(np.arange(len(lengths)), lengths)
    return a_T[there], b_T[there], np.bincount(row[there], minlength=len(lengths))


def blocks(num_tokens_N: np.ndarray) -> Iterator[tuple[slice, slice, np.ndarray]]:
    """Sequences, each with a token, in blocks: which of them, which tokens, and where in these each sequence begins."""
    ends_N = np.cumsum(num_tokens_N)
    starts_N = ends_N - num_tokens_N
    begin = 0
    while begin < len(starts_N):
        last = max(int(np.searchsorted(ends_N, starts_N[begin] + _BLOCK_TOKENS, "right")), begin + 1)
        yield slice(begin, last), slice(starts_N[begin], ends_N[last - 1]), starts_N[begin:last] - starts_N[begin]
        begin = last
