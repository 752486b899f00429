"""Flatten lists of per-token values, one list per sequence.

Shapes: T tokens from several sequences, concatenated, N sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ...tracer.arrow_arrays import number_array
from ..statistics.estimators import Array

_BLOCK_TOKENS = 1 << 16
"""Number of tokens to process at once. It is small enough for their arrays to fit in a core's cache."""

Column: TypeAlias = pa.Array | pa.ChunkedArray

Block = tuple[slice, slice, np.ndarray]
"""Range of sequences, range of tokens, and each sequence's first token, counted from the start of that token range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    logprobs: dict[str, Array]
    lengths_N: np.ndarray
    counted_T: np.ndarray | None = None
    """True if the token is in the loss and every pass has its logprob. None if this is the case for all tokens."""
    advantage_N: Array | None = None
    """Each sequence's advantage. NaN if missing, None if advantages were not read."""
    advantage_T: Array | None = None
    """Each token's advantage. NaN if missing, None if no sequence has an advantage per token."""

    @property
    def starts_N(self) -> np.ndarray:
        return np.asarray(np.cumsum(self.lengths_N) - self.lengths_N)

    @property
    def sequence_T(self) -> np.ndarray:
        return np.repeat(np.arange(len(self.lengths_N)), self.lengths_N)

    def cut(self, sequences: slice, tokens: slice) -> Tokens:
        def part(values_T: np.ndarray) -> np.ndarray:
            return values_T[tokens] if values_T.dtype == bool else values_T[tokens].astype(np.float64)

        advantage_N = None if self.advantage_N is None else self.advantage_N[sequences]
        return self._mapped(part, self.lengths_N[sequences], advantage_N)

    def where(self, kept_T: np.ndarray | None) -> Tokens:
        if kept_T is None or kept_T.all():
            return self
        lengths_N = np.bincount(self.sequence_T[kept_T], minlength=len(self.lengths_N))
        return self._mapped(lambda values_T: values_T[kept_T], lengths_N, self.advantage_N)

    def _mapped(
        self, part: Callable[[np.ndarray], np.ndarray], lengths_N: np.ndarray, advantage_N: Array | None
    ) -> Tokens:
        return Tokens(
            logprobs={name: part(values_T) for name, values_T in self.logprobs.items()},
            lengths_N=lengths_N,
            counted_T=None if self.counted_T is None else part(self.counted_T),
            advantage_N=advantage_N,
            advantage_T=None if self.advantage_T is None else part(self.advantage_T),
        )


def tokens_of(
    logprobs: Mapping[str, Column], *, mask: Column | None = None, advantage: Column | None = None,
    advantages: Column | None = None,
) -> Tokens:  # fmt: skip
    """Flatten Arrow lists of per-token values. Each sequence is cut to the length of its shortest pass. With an empty
    `mask` list, every token counts. `advantages` override `advantage`."""
    needed = {name: flat(lists) for name, lists in logprobs.items()}
    lengths_N = np.minimum.reduce([own_N for _, own_N in needed.values()])
    counted_T = None if mask is None else counted(mask, lengths_N)
    arrays: dict[str, Array] = {}
    for name, (values, own_N) in needed.items():
        is_whole = np.array_equal(own_N, lengths_N)
        cut = values if is_whole else values.filter(number_array(first(own_N, lengths_N), pa.bool_()))
        if cut.null_count:
            valid_T = array_of(cut.is_valid())
            counted_T = valid_T if counted_T is None else counted_T & valid_T
        arrays[name] = array_of(cut)
    advantage_N = None if advantage is None else array_of(advantage).astype(np.float64)
    return Tokens(
        logprobs=arrays, lengths_N=lengths_N, counted_T=counted_T, advantage_N=advantage_N,
        advantage_T=None if advantages is None else _by_token(advantages, advantage_N, lengths_N),
    )  # fmt: skip


def blocks(num_tokens_N: np.ndarray) -> Iterator[Block]:
    """Yield blocks with about _BLOCK_TOKENS tokens. A longer sequence gets its own block."""
    ends_N = np.cumsum(num_tokens_N)
    starts_N = ends_N - num_tokens_N
    begin = 0
    while begin < len(starts_N):
        last = max(int(np.searchsorted(ends_N, starts_N[begin] + _BLOCK_TOKENS, "right")), begin + 1)
        yield slice(begin, last), slice(starts_N[begin], ends_N[last - 1]), starts_N[begin:last] - starts_N[begin]
        begin = last


def flat(lists: Column) -> tuple[pa.Array, np.ndarray]:
    whole = lists.combine_chunks() if isinstance(lists, pa.ChunkedArray) else lists
    return whole.flatten(), np.diff(array_of(whole.offsets)).astype(np.int64)


def array_of(values: Column) -> np.ndarray:
    """Convert Arrow values to NumPy, and NULL to NaN. `to_numpy` would spend 0.3 s importing pandas."""
    whole = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
    if pa.types.is_boolean(whole.type):
        return np.from_dlpack(whole.cast(pa.uint8())).view(bool)
    if whole.null_count:
        whole = whole.cast(pa.float64()) if pa.types.is_integer(whole.type) else whole
        whole = pc.coalesce(whole, number_array(np.full(len(whole), np.nan), whole.type))
    return np.from_dlpack(whole)


def first(lengths_N: np.ndarray, kept_N: np.ndarray) -> np.ndarray:
    """Return a mask that is True for the first `kept_N` values in each list.

    >>> first(np.array([2, 3]), np.array([1, 3])).tolist()
    [True, False, True, True, True]
    """
    position = np.arange(lengths_N.sum()) - np.repeat(np.cumsum(lengths_N) - lengths_N, lengths_N)
    return np.asarray(position < np.repeat(kept_N, lengths_N))


def counted(mask: Column, lengths_N: np.ndarray) -> np.ndarray | None:
    """Return a mask that is True for tokens in the loss, [T], or None if all tokens are in the loss."""
    values, known_N = flat(mask)
    if not len(values):
        return None
    counted_T = np.repeat(known_N == 0, lengths_N)
    shortest_N = np.minimum(known_N, lengths_N)
    flags = array_of(pc.and_kleene(values, values.is_valid()))
    counted_T[first(lengths_N, shortest_N)] = flags[first(known_N, shortest_N)]
    return counted_T


def fitted(lists: Column, lengths_N: np.ndarray) -> Array:
    values, own_N = flat(lists)
    found = array_of(values)
    if np.array_equal(own_N, lengths_N):
        return found
    shortest_N = np.minimum(own_N, lengths_N)
    fitted_T = np.full(int(lengths_N.sum()), np.nan, found.dtype)
    fitted_T[first(lengths_N, shortest_N)] = found[first(own_N, shortest_N)]
    return fitted_T


def _by_token(advantages: Column, advantage_N: Array | None, lengths_N: np.ndarray) -> Array | None:
    values, own_N = flat(advantages)
    if not len(values):
        return None
    of_sequence_N = np.full(len(lengths_N), np.nan) if advantage_N is None else advantage_N
    own_T = fitted(advantages, lengths_N)
    return np.where(np.repeat(own_N > 0, lengths_N), own_T, np.repeat(of_sequence_N, lengths_N))


ARROW = {"INTEGER": pa.int32(), "BIGINT": pa.int64(), "DOUBLE": pa.float64(), "BOOLEAN": pa.bool_()}


def struct_fields(types: Mapping[str, str]) -> list[pa.Field]:
    return [pa.field(name, ARROW[kind]) for name, kind in types.items()]


def centred(values: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Return values minus their group's mean. The mean is over finite values only."""
    known = np.isfinite(values)
    total = np.bincount(group, np.where(known, values, 0.0))
    count = np.bincount(group, known.astype(float))
    centred: np.ndarray = values - (total / np.maximum(count, 1))[group]
    return centred
