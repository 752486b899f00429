"""How far two passes lie apart in each sequence of some steps: from the sums that the trace keeps, or else from tokens.

Shapes: N sequences, ordered by step and name; T tokens of several sequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..trace.database import Database
from ..trace.pair_sums import finite
from ..trace.quoting import quoted
from ..trace.source import Pair
from ..trace.tokens import PassRows, token_query, tokens_of_rows

_KEPT_TOKENS = 8 << 20
"""Tokens whose logprobs are kept, so that those of chosen sequences are not read again: 8 bytes each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceMismatch:
    """Sequences with response tokens, whether their passes compare or not."""

    steps: np.ndarray
    """[N]"""
    seq_ids: list[str]
    """[N]"""
    lengths: np.ndarray
    """[N] response tokens."""
    prompt_lengths: np.ndarray
    """[N] prompt tokens; 0 where not recorded."""
    num_compared: np.ndarray
    """[N] tokens that count and have a finite logprob in both passes."""
    sum_abs_d: np.ndarray
    """[N] nats; 0 where none compares, and the next alike."""
    max_abs_d: np.ndarray
    lists: tuple[pa.ChunkedArray, pa.ChunkedArray] | None
    """Logprobs of both passes, empty where there are none; None where they were not read, or are too many to keep."""
    places: np.ndarray
    """[N] where a sequence is in `lists`."""

    def logprobs(self, row: int) -> tuple[pa.Array, pa.Array] | None:
        """Both passes' logprobs of a sequence, where they are kept."""
        if self.lists is None:
            return None
        a, b = (column[int(self.places[row])].values for column in self.lists)
        return a, b

    @property
    def mean_abs_d(self) -> np.ndarray:
        """[N] nats."""
        return np.asarray(self.sum_abs_d / np.maximum(self.num_compared, 1))


def read_sequence_mismatch(
    database: Database, pair: Pair, run: str, steps: Sequence[int], *, compares: bool
) -> SequenceMismatch:
    """The gaps of every sequence of some steps; `compares` says whether both passes have logprobs at all."""
    if not steps:
        return _gaps(pa.table({name: pa.array([], kind) for name, kind in _SCHEMA.items()}))
    within = f"run = {quoted(run)} AND step IN ({', '.join(str(step) for step in steps)})"
    if not compares:
        database.connection.use_threads()
        return _gaps(database.connection.sql(_KEYS.format(within=within)).to_arrow_table())
    if pair in database.covered:
        database.connection.use_threads()
        query = _KEPT.format(within=within, a=quoted(pair[0]), b=quoted(pair[1]))
        return _gaps(database.connection.sql(query).to_arrow_table())
    passes = {side: PassRows(name=name, optional=True) for side, name in zip(("a", "b"), pair, strict=True)}
    query = token_query(
        passes, ["s.step", "s.seq_id", _OWN], run=run, steps=steps, lists=["mask"], where="s.num_response_tokens > 0"
    )
    return _gaps(_of_lists(database.connection.batches(query)))


_SCHEMA = {
    "step": pa.int64(), "seq_id": pa.string(), "length": pa.int64(), "prompt_length": pa.int64(),
    "num_compared": pa.int64(), "sum_abs_d": pa.float64(), "max_abs_d": pa.float64(),
}  # fmt: skip

_OWN = "num_response_tokens::BIGINT AS length, coalesce(num_prompt_tokens, 0)::BIGINT AS prompt_length"

_KEYS = f"""
    SELECT step, seq_id, {_OWN}, 0::BIGINT AS num_compared, 0::DOUBLE AS sum_abs_d, 0::DOUBLE AS max_abs_d
    FROM sequences WHERE {{within}} AND num_response_tokens > 0
"""

_KEPT = f"""
    SELECT s.step, s.seq_id, {_OWN}, coalesce(num_tokens, 0)::BIGINT AS num_compared,
           coalesce(sum_abs_d, 0) AS sum_abs_d, coalesce(max_abs_d, 0) AS max_abs_d
    FROM (SELECT * FROM sequences WHERE {{within}} AND num_response_tokens > 0) AS s
    LEFT JOIN (
        SELECT step, seq_id, num_tokens, sum_abs_d, max_abs_d FROM sequence_sums
        WHERE {{within}} AND pass_a = {{a}} AND pass_b = {{b}} AND iteration_a = 0 AND iteration_b = 0
    ) AS kept ON kept.step = s.step AND kept.seq_id = s.seq_id
"""


def _of_lists(batches: Iterable[pa.RecordBatch]) -> pa.Table:
    """The sums of all sequences, with their lists as long as these are few."""
    parts: list[pa.Table] = []
    num_held = 0
    for batch in batches:
        parts.append(_of_tokens(batch))
        num_held += len(batch.column("a").values) + len(batch.column("b").values)
        if num_held > 2 * _KEPT_TOKENS:
            parts = [pa.concat_tables([part.select(list(_SCHEMA)) for part in parts])]
    return pa.concat_tables(parts)


def _of_tokens(rows: pa.RecordBatch) -> pa.Table:
    """The sums of each sequence of a batch, and the lists that they are of."""
    tokens = finite(tokens_of_rows(rows, ("a", "b")))
    full = tokens.num_tokens_N > 0
    starts = (np.cumsum(tokens.num_tokens_N) - tokens.num_tokens_N)[full]
    size_T = np.abs(np.subtract(tokens.a_T, tokens.b_T, dtype=np.float64))
    sums = {name: np.zeros(len(full)) for name in ("sum_abs_d", "max_abs_d")}
    if full.any():
        sums["sum_abs_d"][full] = np.add.reduceat(size_T, starts)
        sums["max_abs_d"][full] = np.maximum.reduceat(size_T, starts)
    own = {name: rows.column(name) for name in ("step", "seq_id", "length", "prompt_length", "a", "b")}
    return pa.table({**own, "num_compared": tokens.num_tokens_N, **sums})


def _gaps(table: pa.Table) -> SequenceMismatch:
    lists = {name: table[name] for name in ("a", "b") if name in table.column_names}
    # Threads hand rows out in any order.
    order = pc.sort_indices(table, [("step", "ascending"), ("seq_id", "ascending")])
    keys = table.select(list(_SCHEMA)).take(order)
    return SequenceMismatch(
        steps=keys["step"].to_numpy(), seq_ids=keys["seq_id"].to_pylist(), lengths=keys["length"].to_numpy(),
        prompt_lengths=keys["prompt_length"].to_numpy(), num_compared=keys["num_compared"].to_numpy(),
        sum_abs_d=keys["sum_abs_d"].to_numpy(), max_abs_d=keys["max_abs_d"].to_numpy(),
        lists=(lists["a"], lists["b"]) if lists else None, places=order.to_numpy(),
    )  # fmt: skip
