"""Export sequences to Parquet, one row each, with tokens, the logprobs from every pass, and d between the passes
of a pair."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from ...schemas.passes import CURRENT, ROLLOUT, STANDARD, TRAIN
from ...schemas.tables import SEQUENCES_TABLE
from ...tracer.progress import Advance
from ..trace.columns import scored_passes
from ..trace.database import Database
from ..trace.macros import quoted
from ..trace.source import Pair
from ..trace.tokens import step_ranges

CHUNK_TOKENS = 1 << 20
"""Maximum number of prompt and response tokens in memory at once; a step with more tokens is still read whole."""

_COLUMNS = tuple(column.name for column in SEQUENCES_TABLE.columns if column.name not in ("attempt", "writer"))

_STEPS = """
    SELECT step, sum(num_response_tokens + coalesce(num_prompt_tokens, 0))::BIGINT FROM sequences GROUP BY step ORDER BY step
"""

_METRICS = "SELECT step, name, value, text FROM metrics ORDER BY step, logged_at, name"


def sequence_tables(database: Database, pair: Pair) -> Iterator[pa.Table]:
    """Yield the sequences by step and name, a few steps per table; one empty table for a trace without any."""
    passes = {name: f"p{place}" for place, name in enumerate(passes_of(database))}
    tokens = dict(database.connection.execute(_STEPS).fetchall())
    for steps in step_ranges(tokens, CHUNK_TOKENS) or [range(0)]:
        yield database.connection.sql(_row_query(passes, pair, steps)).to_arrow_table()


def metric_batches(database: Database) -> Iterator[pa.RecordBatch]:
    """Yield the logged values by step, after an empty batch that carries the schema."""
    rows = database.connection.batches(_METRICS)
    yield pa.RecordBatch.from_pylist([], rows.schema)
    yield from rows


def passes_of(database: Database) -> list[str]:
    """Return the names of the passes with scores: first the standard passes, then the others by name."""
    order = {name: place for place, name in enumerate(STANDARD)}
    return sorted(scored_passes(database), key=lambda name: (order.get(name, len(order)), name))


def _row_query(passes: Mapping[str, str], pair: Pair, steps: range) -> str:
    """Return the SQL query for the rows in the given steps. `passes` maps the name of each pass with scores to an SQL
    alias.
    """
    within = f"step BETWEEN {steps.start} AND {steps.stop - 1}"
    columns = [f"s.{name}" for name in _COLUMNS]
    columns += [f'{table}.logprobs AS "{name}_logprobs"' for name, table in passes.items()]
    entropies = [f"{passes[name]}.entropy" for name in (TRAIN, CURRENT, ROLLOUT) if name in passes]
    columns.append(f"coalesce({', '.join([*entropies, 'NULL::FLOAT[]'])}) AS entropy")
    d = "NULL::DOUBLE[]"
    if set(pair) <= set(passes):
        a, b = (f"{passes[name]}.logprobs" for name in pair)
        d = (
            f"CASE WHEN {a} IS NOT NULL AND {b} IS NOT NULL "
            f"THEN list_transform(list_zip({a}, {b}), lambda x: x[1]::DOUBLE - x[2]::DOUBLE) END"
        )
    joins = "".join(
        f" LEFT JOIN (SELECT step, seq_id, logprobs, entropy FROM scores WHERE {within} AND iteration = 0 "
        f'AND "pass" = {quoted(name)}) AS {table} ON {table}.step = s.step AND {table}.seq_id = s.seq_id'
        for name, table in passes.items()
    )
    rows = f"(SELECT * FROM sequences WHERE {within}) AS s{joins}"
    return f"SELECT {', '.join(columns)}, {d} AS d FROM {rows} ORDER BY s.step, s.seq_id"


def write_parquet(path: Path, rows: Iterator[pa.Table | pa.RecordBatch], advance: Advance = lambda number: None) -> int:
    """Write rows as Parquet, one row group per chunk; return the number of rows. The first chunk sets the schema."""
    first = next(rows)
    num_rows = 0
    with pq.ParquetWriter(path, first.schema, compression="zstd") as writer:
        for part in chain([first], rows):
            table = part if isinstance(part, pa.Table) else pa.Table.from_batches([part])
            writer.write_table(table)
            num_rows += table.num_rows
            advance(table.num_rows)
    return num_rows
