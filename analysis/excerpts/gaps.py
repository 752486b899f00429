"""How far two passes lie apart in each sequence of some steps: from the sums that the trace keeps, or else from tokens.

Shapes: N sequences, ordered by step and name; T tokens of several sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from ..database import Database, quoted
from ..source import Pair
from ..token_lists import BATCH_ROWS, counted_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Gaps:
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

    @property
    def mean_abs_d(self) -> np.ndarray:
        """[N] nats."""
        return np.asarray(self.sum_abs_d / np.maximum(self.num_compared, 1))


def read_gaps(database: Database, pair: Pair, run: str, steps: Sequence[int], *, compares: bool) -> Gaps:
    """The gaps of every sequence of some steps; `compares` says whether both passes have logprobs at all."""
    if not steps:
        return _gaps(pa.table({name: pa.array([], kind) for name, kind in _SCHEMA.items()}))
    within = f"run = {quoted(run)} AND step IN ({', '.join(str(step) for step in steps)})"
    database.connection.execute("RESET threads")
    if not compares:
        return _gaps(database.connection.sql(_KEYS.format(within=within)).to_arrow_table())
    names = {"within": within, "a": quoted(pair[0]), "b": quoted(pair[1])}
    if pair in database.covered:
        return _gaps(database.connection.sql(_KEPT.format(**names)).to_arrow_table())
    batches = database.connection.sql(_LISTS.format(**names)).to_arrow_reader(BATCH_ROWS)
    return _gaps(pa.concat_tables([_of_tokens(batch) for batch in batches]))


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

_SCORED = 'SELECT step, seq_id, logprobs FROM scores WHERE {{within}} AND "pass" = {{{name}}} AND iteration = 0'

_LISTS = f"""
    SELECT s.step, s.seq_id, {_OWN}, coalesce(s.response_mask, []::BOOLEAN[]) AS mask,
           coalesce(a.logprobs, []::FLOAT[]) AS a, coalesce(b.logprobs, []::FLOAT[]) AS b
    FROM (SELECT * FROM sequences WHERE {{within}} AND num_response_tokens > 0) AS s
    LEFT JOIN ({_SCORED.format(name="a")}) AS a ON a.step = s.step AND a.seq_id = s.seq_id
    LEFT JOIN ({_SCORED.format(name="b")}) AS b ON b.step = s.step AND b.seq_id = s.seq_id
"""


def _of_tokens(rows: pa.RecordBatch) -> pa.Table:
    """The sums of each sequence of a batch."""
    a_T, b_T, counted_N = counted_tokens(rows.column("a"), rows.column("b"), rows.column("mask"))
    there_T = np.isfinite(a_T) & np.isfinite(b_T)
    row_T = np.repeat(np.arange(len(counted_N)), counted_N)[there_T]
    size_T = np.abs(a_T[there_T].astype(np.float64) - b_T[there_T].astype(np.float64))
    num_N = np.bincount(row_T, minlength=len(counted_N))
    full = num_N > 0
    starts = (np.cumsum(num_N) - num_N)[full]
    sums = {name: np.zeros(len(num_N)) for name in ("sum_abs_d", "max_abs_d")}
    if full.any():
        sums["sum_abs_d"][full] = np.add.reduceat(size_T, starts)
        sums["max_abs_d"][full] = np.maximum.reduceat(size_T, starts)
    own = {name: rows.column(name) for name in ("step", "seq_id", "length", "prompt_length")}
    return pa.table({**own, "num_compared": num_N, **sums})


def _gaps(table: pa.Table) -> Gaps:
    # Threads hand rows out in any order.
    table = table.sort_by([("step", "ascending"), ("seq_id", "ascending")])
    return Gaps(
        steps=table["step"].to_numpy(), seq_ids=table["seq_id"].to_pylist(), lengths=table["length"].to_numpy(),
        prompt_lengths=table["prompt_length"].to_numpy(), num_compared=table["num_compared"].to_numpy(),
        sum_abs_d=table["sum_abs_d"].to_numpy(), max_abs_d=table["max_abs_d"].to_numpy(),
    )  # fmt: skip
