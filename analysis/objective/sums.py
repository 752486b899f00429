"""The sums of every sequence, in one pass over the tokens.

Shapes: N sequences, U updates (step and inner iteration), K terms, C columns.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa

from ...tracer.progress import Progress
from ..database import Database
from ..lists import mapped
from ..totals import Array
from .concentration import NUM_BINS, Carried, bins_of
from .reading import read_batches
from .sequence_sums import COLUMNS, sequence_sums
from .sides import Sides
from .tokens import tokens_of

_KEYS = ("step", "iteration", "sequence", "unit")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """[N] arrays, an element a sequence and inner iteration, in a fixed order."""

    unit_N: np.ndarray
    """A number for each group (group_id and step), or sequence where there are no groups."""
    updates: list[tuple[int, int]]
    """[U] (step, inner iteration)."""
    update_N: np.ndarray
    """Place in `updates`."""
    columns: dict[str, Array]
    """The sums of sequence_sums.COLUMNS."""
    carried: Carried
    """How few terms carry the bias."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """The sums of a batch of sequences."""

    number: int
    """Of the range of steps that it is from."""
    keys: dict[str, np.ndarray]
    columns_CN: np.ndarray
    updates: list[tuple[int, int]]
    bins: np.ndarray
    """[U, 2, NUM_BINS] counts and sums of |bias|."""
    num_terms: np.ndarray
    """[U] with an advantage."""
    num_read: int


def read_sums(database: Database, sides: Sides, progress: Progress) -> Sums:
    """Read every token once."""
    batches: list[_Batch] = []
    carried = Carried()
    (row,) = database.connection.execute(
        "SELECT coalesce(sum(num_response_tokens), 0)::BIGINT FROM sequences"
    ).fetchall()
    with ThreadPoolExecutor(os.cpu_count()) as pool, progress("reading tokens", row[0]) as advance:
        for batch in mapped(pool, partial(_of_batch, sides), read_batches(database, sides)):
            carried.add(batch.number, batch.updates, batch.bins, batch.num_terms)
            advance(batch.num_read)
            batches.append(batch)
    carried.close()
    keys = {
        name: np.concatenate([np.zeros(0, np.int64), *(batch.keys[name] for batch in batches)]) for name in _KEYS[:2]
    }
    keys |= {
        name: np.concatenate([np.zeros(0, np.uint64), *(batch.keys[name] for batch in batches)]) for name in _KEYS[2:]
    }
    order = np.lexsort((keys["sequence"], keys["iteration"], keys["step"]))
    table_CN = np.concatenate([np.zeros((len(COLUMNS), 0)), *(batch.columns_CN for batch in batches)], axis=1)[:, order]
    updates, update_N = _updates(keys["step"][order], keys["iteration"][order])
    return Sums(
        unit_N=keys["unit"][order], updates=updates, update_N=update_N,
        columns=dict(zip(COLUMNS, table_CN, strict=True)), carried=carried,
    )  # fmt: skip


def _updates(step_N: np.ndarray, iteration_N: np.ndarray) -> tuple[list[tuple[int, int]], np.ndarray]:
    """The (step, inner iteration) pairs that there are, in order, and which of them each element is."""
    pairs, place_N = np.unique(np.stack([step_N, iteration_N]).astype(np.int64), axis=1, return_inverse=True)
    return [(int(step), int(iteration)) for step, iteration in pairs.T], place_N.reshape(-1)


def _of_batch(sides: Sides, batch: tuple[int, pa.RecordBatch]) -> _Batch:
    number, rows = batch
    keys = {name: rows.column(name).to_numpy() for name in _KEYS}
    updates, update_N = _updates(keys["step"], keys["iteration"])
    bins = np.zeros((len(updates), 2, NUM_BINS))
    parts = [np.zeros((len(COLUMNS), 0))]
    tokens = tokens_of(rows)
    with np.errstate(all="ignore"):
        for block, sequences in tokens.blocks():
            found, size_K, terms = sequence_sums(sides.loss, block)
            parts.append(found)
            _bin(bins, size_K, update_N[sequences], terms.lengths_N)
    columns_CN = np.concatenate(parts, axis=1)
    num_terms = np.bincount(update_N, columns_CN[COLUMNS.index("terms_known")], minlength=len(updates))
    return _Batch(
        number=number, keys=keys, columns_CN=columns_CN, updates=updates, bins=bins, num_terms=num_terms,
        num_read=len(tokens.train_T),
    )  # fmt: skip


def _bin(bins: np.ndarray, size_K: Array, update_N: np.ndarray, lengths_N: np.ndarray) -> None:
    """Count and add up the sizes of terms, of which each sequence has `lengths_N`, by update and bin."""
    low, high = int(update_N.min()), int(update_N.max())
    place_K = bins_of(size_K)
    if high > low:
        place_K = place_K + np.repeat((update_N - low) * NUM_BINS, lengths_N)
    num = (high - low + 1) * NUM_BINS
    bins[low : high + 1, 0] += np.bincount(place_K, minlength=num).reshape(-1, NUM_BINS)
    bins[low : high + 1, 1] += np.bincount(place_K, size_K, minlength=num).reshape(-1, NUM_BINS)
