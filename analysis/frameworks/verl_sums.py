"""What verl's off-policy numbers need of each sequence: the sums behind the macros of sql/verl.sql.

Shapes: T tokens of several sequences, one after the other; N sequences. Each sequence's sums depend on its own tokens
alone, so that they have the same digits whatever is computed beside them, and by how many threads.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa

from ..lists import mapped
from ..token_lists import BATCH_ROWS, blocks, counted_tokens

SAFETY_BOUND = 20.0
"""verl clamps log-ratios to +-20 nats before it takes their exp."""

_KEYS = ("run", "step", "seq_id", "iteration_a", "iteration_b")

_SUMS = (
    "sum_old", "sum_rollout", "sum_d", "sum_k3", "sum_squared_ratio", "sum_prob_diff", "sum_prob_diff2",
    "sum_old_prob", "sum_rollout_prob", "sum_old_prob2", "sum_rollout_prob2", "sum_prob_product", "max_prob_diff",
)  # fmt: skip

STRUCT = f"STRUCT(num_tokens BIGINT, {', '.join(f'{name} DOUBLE' for name in _SUMS)})"


def register(connection: duckdb.DuckDBPyConnection) -> None:
    """Give a connection the function `verl_sums(old FLOAT[], rollout FLOAT[], mask BOOLEAN[])`.

    An empty mask counts every token. A token without a logprob in one of both counts in no sum.
    """
    connection.create_function("verl_sums", _verl_sums, ["FLOAT[]", "FLOAT[]", "BOOLEAN[]"], STRUCT, type="arrow")


@contextmanager
def computed(connection: duckdb.DuckDBPyConnection, verl_rows: str) -> Iterator[None]:
    """Let `verl_summed` of a connection hold the sums of what a query of `verl_rows` gives, computed beside the reading.

    The same function gives them as when DuckDB calls it; here it does not wait for the tokens to be read. `verl_summed` has
    to be defined anew afterwards.
    """
    connection.execute("RESET threads")
    rows = connection.sql(verl_rows).to_arrow_reader(BATCH_ROWS)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        batches = list(mapped(pool, _summed, rows)) or [_summed(pa.RecordBatch.from_pylist([], rows.schema))]
    connection.register("verl_computed", pa.Table.from_batches(batches))
    connection.execute("CREATE OR REPLACE MACRO verl_summed(a, b) AS TABLE SELECT * FROM verl_computed")
    try:
        yield
    finally:
        connection.unregister("verl_computed")


def _summed(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Keys and sums of the sequences of `verl_rows`."""
    sums = _verl_sums(rows.column("old"), rows.column("rollout"), rows.column("mask"))
    names = [*_KEYS, *(field.name for field in sums.type)]
    return pa.RecordBatch.from_arrays([*(rows.column(name) for name in _KEYS), *sums.flatten()], names)


def token_sums(old_T: np.ndarray, rollout_T: np.ndarray, num_tokens_N: np.ndarray) -> np.ndarray:
    """[13, N] sums over sequences that have so many tokens each, one at least; NaN and infinities pass through."""
    found = np.empty((len(_SUMS), len(num_tokens_N)))
    for sequences, tokens, starts in blocks(num_tokens_N):
        with np.errstate(all="ignore"):
            terms = list(_terms(old_T[tokens].astype(np.float64), rollout_T[tokens].astype(np.float64)))
        found[:-1, sequences] = [np.add.reduceat(term, starts) for term in terms[:-1]]
        found[-1, sequences] = np.maximum.reduceat(terms[-1], starts)
    return found


def _terms(old_T: np.ndarray, rollout_T: np.ndarray) -> Iterator[np.ndarray]:
    """What each token adds to each of `_SUMS`, in their order."""
    d_T = old_T - rollout_T
    growth_T = np.expm1(d_T)  # keeps k3's digits where d is small
    old_prob_T, rollout_prob_T = np.exp(old_T), np.exp(rollout_T)
    diff_T = np.abs(old_prob_T - rollout_prob_T)
    yield from (old_T, rollout_T, d_T, growth_T - d_T)
    yield np.square(np.clip(growth_T + 1, np.exp(-SAFETY_BOUND), np.exp(SAFETY_BOUND)))
    yield from (diff_T, np.square(diff_T), old_prob_T, rollout_prob_T)
    yield from (np.square(old_prob_T), np.square(rollout_prob_T), old_prob_T * rollout_prob_T)
    yield diff_T


def _verl_sums(old: Any, rollout: Any, mask: Any) -> pa.StructArray:
    old_T, rollout_T, num_tokens = counted_tokens(old, rollout, mask)
    found = np.zeros((len(_SUMS), len(num_tokens)))
    full = num_tokens > 0
    found[:, full] = token_sums(old_T, rollout_T, num_tokens[full])
    arrays = [pa.array(num_tokens, pa.int64()), *(pa.array(row) for row in found)]
    return pa.StructArray.from_arrays(arrays, ["num_tokens", *_SUMS])
