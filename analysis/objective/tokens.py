"""A batch of sequences as arrays, cut into blocks that stay in a core's cache.

Shapes: T tokens of several sequences, one after the other; N sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from ..statistics.estimators import Array
from ..trace.lists import counted, flat

BLOCK_TOKENS = 1 << 16
"""Tokens that are worked on at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Tokens of some sequences; every sequence has one at least."""

    train_T: Array
    rollout_T: Array
    now_T: Array
    """Under the policy inside the loss; the same array as train_T where it was not recorded."""
    there_T: np.ndarray | None
    """bool: whether the loss counts it, and every pass has a value; None: all of them."""
    advantage_T: Array | None
    """NaN where there is none; None where each sequence has one for all of its tokens."""
    advantage_N: Array
    lengths_N: np.ndarray

    @property
    def starts_N(self) -> np.ndarray:
        """The first token of each sequence."""
        return np.asarray(np.cumsum(self.lengths_N) - self.lengths_N)

    def cut(self, rows: slice, tokens: slice) -> Tokens:
        """Some sequences with their tokens, in float64."""
        train_T = self.train_T[tokens].astype(np.float64)

        def side(values_T: Array) -> Array:
            return train_T if values_T is self.train_T else values_T[tokens].astype(np.float64)

        return Tokens(
            train_T=train_T, rollout_T=side(self.rollout_T), now_T=side(self.now_T),
            there_T=None if self.there_T is None else self.there_T[tokens],
            advantage_T=None if self.advantage_T is None else self.advantage_T[tokens],
            advantage_N=self.advantage_N[rows], lengths_N=self.lengths_N[rows],
        )  # fmt: skip

    def blocks(self) -> Iterator[tuple[Tokens, slice]]:
        """Parts, and which sequences they hold; a longer sequence is one alone."""
        ends_N = np.cumsum(self.lengths_N)
        first = 0
        while first < len(ends_N):
            start = int(ends_N[first] - self.lengths_N[first])
            last = max(int(np.searchsorted(ends_N, start + BLOCK_TOKENS, "right")), first + 1)
            rows = slice(first, last)
            yield self.cut(rows, slice(start, int(ends_N[last - 1]))), rows
            first = last


def tokens_of(rows: pa.RecordBatch) -> Tokens:
    """The columns of reading.read_batches as arrays."""
    train, lengths_N = flat(rows.column("train"))
    passes = {"train": train}
    for name in ("rollout", "now"):
        if name in rows.schema.names:
            passes[name] = flat(rows.column(name))[0]
    there_T = counted(rows.column("mask"), lengths_N) if len(rows.column("mask").flatten()) else None
    for values in passes.values():
        if values.null_count:
            valid_T = values.is_valid().to_numpy(zero_copy_only=False)
            there_T = valid_T if there_T is None else there_T & valid_T
    arrays = {name: values.to_numpy(zero_copy_only=False) for name, values in passes.items()}
    advantage_N = rows.column("advantage").to_numpy(zero_copy_only=False).astype(np.float64)
    train_T = arrays["train"]
    return Tokens(
        train_T=train_T, rollout_T=arrays.get("rollout", train_T), now_T=arrays.get("now", train_T), there_T=there_T,
        advantage_T=_by_token(rows.column("advantages"), advantage_N, lengths_N), advantage_N=advantage_N,
        lengths_N=lengths_N,
    )  # fmt: skip


def _by_token(lists: Any, advantage_N: Array, lengths_N: np.ndarray) -> Array | None:
    """[T] advantages where a sequence has one for each token; NaN where it has none, or a list of another length."""
    values, known_N = flat(lists)
    if not len(values):
        return None
    advantage_T = np.repeat(np.where(known_N > 0, np.nan, advantage_N), lengths_N)
    fits_N = known_N == lengths_N
    own_T = values.to_numpy(zero_copy_only=False).astype(np.float64)
    advantage_T[np.repeat(fits_N, lengths_N)] = own_T[np.repeat(fits_N, known_N)]
    return advantage_T
