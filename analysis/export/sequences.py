"""One row a sequence: its tokens, the logprobs of every pass, and d of a pair."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from ...schemas.passes import CURRENT, ROLLOUT, STANDARD, TRAIN
from ...schemas.tables import SEQUENCES_TABLE
from ..trace.database import Database, step_condition
from ..trace.quoting import quoted
from ..trace.source import Pair

CHUNK_TOKENS = 1 << 20
"""Tokens of prompts and responses that are in memory at once; a step that has more is taken as a whole."""

_COLUMNS = tuple(column.name for column in SEQUENCES_TABLE.columns if column.name not in ("attempt", "writer"))

_STEPS = """
    SELECT step, sum(num_response_tokens + coalesce(num_prompt_tokens, 0))::BIGINT FROM sequences GROUP BY step ORDER BY step
"""

_METRICS = "SELECT step, name, value, text FROM metrics ORDER BY step, logged_at, name"


def sequence_tables(database: Database, pair: Pair) -> Iterator[pa.Table]:
    """The sequences of a trace by step and name, some steps a table; a trace without sequences gives one of no row."""
    query = _RowQuery(database, pair)
    yield from (database.connection.sql(query(steps)).to_arrow_table() for steps in _chunks(database) or [[]])


def metric_batches(database: Database) -> Iterator[pa.RecordBatch]:
    """What was logged, by step; the first batch has no row."""
    rows = database.connection.batches(_METRICS)
    yield pa.RecordBatch.from_pylist([], rows.schema)
    yield from rows


def passes_of(database: Database) -> list[str]:
    """The passes that have scores: the standard ones first, then by name."""
    order = {name: place for place, name in enumerate(STANDARD)}
    names = [name for (name,) in database.connection.execute('SELECT DISTINCT "pass" FROM scores').fetchall()]
    return sorted(names, key=lambda name: (order.get(name, len(order)), name))


def _chunks(database: Database) -> list[list[int]]:
    chunks: list[list[int]] = []
    filled = CHUNK_TOKENS
    for step, tokens in database.connection.execute(_STEPS).fetchall():
        if filled + tokens > CHUNK_TOKENS:
            chunks.append([])
            filled = 0
        chunks[-1].append(step)
        filled += tokens
    return chunks


class _RowQuery:
    """SQL of the rows of some steps."""

    def __init__(self, database: Database, pair: Pair):
        self._passes = {name: f"p{place}" for place, name in enumerate(passes_of(database))}
        self._pair = pair

    def __call__(self, steps: list[int]) -> str:
        within = step_condition(steps)
        columns = [f"s.{name}" for name in _COLUMNS]
        columns += [f'{table}.logprobs AS "{name}_logprobs"' for name, table in self._passes.items()]
        entropies = [f"{self._passes[name]}.entropy" for name in (TRAIN, CURRENT, ROLLOUT) if name in self._passes]
        columns.append(f"coalesce({', '.join([*entropies, 'NULL::FLOAT[]'])}) AS entropy")
        columns.append(f"{self._difference()} AS d")
        joins = "".join(
            f" LEFT JOIN (SELECT step, seq_id, logprobs, entropy FROM scores WHERE {within} AND iteration = 0 "
            f'AND "pass" = {quoted(name)}) AS {table} ON {table}.step = s.step AND {table}.seq_id = s.seq_id'
            for name, table in self._passes.items()
        )
        rows = f"(SELECT * FROM sequences WHERE {within}) AS s{joins}"
        return f"SELECT {', '.join(columns)} FROM {rows} ORDER BY s.step, s.seq_id"

    def _difference(self) -> str:
        if not set(self._pair) <= set(self._passes):
            return "NULL::DOUBLE[]"
        a, b = (f"{self._passes[name]}.logprobs" for name in self._pair)
        return (
            f"CASE WHEN {a} IS NOT NULL AND {b} IS NOT NULL "
            f"THEN list_transform(list_zip({a}, {b}), lambda x: x[1]::DOUBLE - x[2]::DOUBLE) END"
        )
