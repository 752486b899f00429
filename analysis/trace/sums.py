"""Per-sequence sums of a pair: made from the tokens once, and kept beside the scores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from ...schemas.layout import SUMS
from ...schemas.sums import KINDS, RUN_QUANTILES, SEQUENCE_SUMS
from ...schemas.tables import Table
from ...tracer.index import write_index
from ...tracer.parquet_file import write_checked
from ...tracer.progress import Advance, Progress, no_progress
from ...tracer.whole_file import unnamed_file
from .database import Database, Traces, quoted, sql_file
from .pair_sums import computed
from .quantiles import exact_quantiles
from .source import Pair, Source, made_of_metadata, sums_file

MISMATCH: Pair = ("train", "rollout")

_COMPUTED = f"computed_{SEQUENCE_SUMS.name}"

CHUNK_TOKENS = 32 << 20
"""Tokens that are worked on at once: their quantiles are taken in memory, 8 bytes each."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A range of steps of one run."""

    run: str
    first_step: int
    last_step: int
    num_tokens: int


def ensure(database: Database, pair: Pair, *, of_run: bool = True, progress: Progress = no_progress) -> bool:
    """Make the database's tables of sums hold every sequence of a pair, and return whether anything was computed.

    Only the tokens of steps that lack sums are read. `of_run` asks for quantiles over whole runs too, for which the
    tokens are read twice more.
    """
    if pair in database.covered and (not of_run or pair in database.run_covered):
        return False
    connection = database.connection
    connection.execute(_sql("missing", pair))
    chunks = _missing_chunks(database)
    runs = _runs_without_quantiles(database, pair) if of_run else []
    whole = {run: _run_chunks(database, run) for run in runs}
    total = sum(chunk.num_tokens for chunk in chunks) + 2 * sum(c.num_tokens for part in whole.values() for c in part)
    with progress("reading tokens", total) as advance:
        for chunk in chunks:
            _compute(database, pair, chunk)
            advance(chunk.num_tokens)
        for run in runs:
            _add_run_quantiles(database, pair, run, whole[run], advance)
    # One order, whatever was kept and what computed now: adding up gives one result.
    connection.execute(f"CREATE OR REPLACE TABLE {_COMPUTED} AS SELECT * FROM {_COMPUTED} ORDER BY ALL")
    database.supersede(pair, run_quantiles=of_run)
    return bool(chunks or runs)


def _compute(database: Database, pair: Pair, chunk: Chunk) -> None:
    """Add the sums and quantiles of a range of steps to what was computed."""
    connection = database.connection
    a, b, run = quoted(pair[0]), quoted(pair[1]), quoted(chunk.run)
    sums = computed(connection, f"SELECT * FROM pair_lists({a}, {b}, {run}, {chunk.first_step}, {chunk.last_step})")
    connection.register("computed_sums", sums)
    try:
        connection.execute(_sql("compute_sums", pair, chunk))
    finally:
        connection.unregister("computed_sums")


def summarize(traces: Traces, *, pair: Pair = MISMATCH, progress: Progress = no_progress) -> bool:
    """Keep the per-sequence sums of a pair beside the scores, so that statistics need not read tokens.

    Returns whether sums were written: not when they were there, nor while a trace is live or where it is read-only.
    """
    database = Database(traces)
    return ensure(database, pair, progress=progress) and keep(database, pair)


def keep(database: Database, pair: Pair) -> bool:
    """Write a pair's sums into every trace that is finished and writable, and return whether all of them were."""
    return database.is_whole and all([_keep(database, pair, source) for source in database.sources])


def _keep(database: Database, pair: Pair, source: Source) -> bool:
    if not source.store.is_local or source.is_live or source.journals:
        return False
    try:
        for spec in KINDS.values():
            if spec is not RUN_QUANTILES or pair in database.run_covered:
                _write(database, pair, source, spec)
        write_index(Path(source.store.root))
    except OSError:
        return False
    return True


def _write(database: Database, pair: Pair, source: Source, spec: Table) -> None:
    columns = ", ".join(column.name for column in spec.columns)
    rows = database.connection.sql(
        f"SELECT {columns} FROM computed_{spec.name} WHERE run = ? AND pass_a = ? AND pass_b = ? ORDER BY ALL",
        params=[source.run, *pair],
    ).to_arrow_table()
    write_sums(source, pair, spec, rows)


def write_sums(source: Source, pair: Pair, spec: Table, rows: pa.Table) -> None:
    """Keep sums of a pair that are of all sealed rows of a local trace."""
    schema = spec.schema.with_metadata(made_of_metadata(spec.name, pair, source.segments))
    folder = Path(source.store.root)
    with unnamed_file(folder, SUMS) as temporary:
        written = write_checked(
            temporary, f"{SUMS}/{spec.name}", schema, [rows.cast(schema)],
            compression="zstd", use_dictionary=["pass_a", "pass_b"],
        )  # fmt: skip
        assert written.footer is not None
        temporary.rename(folder / sums_file(spec.name, written.footer))
    # What was used until now stays for who reads it just now, and goes the next time.
    for relative in source.outdated_sums.get((spec.name, pair), []):
        (folder / relative).unlink(missing_ok=True)


def _missing_chunks(database: Database) -> list[Chunk]:
    query = """
        SELECT run, step, sum(num_response_tokens)::BIGINT, any_value(missing.step) IS NOT NULL
        FROM sequences LEFT JOIN missing_steps AS missing USING (run, step)
        GROUP BY run, step ORDER BY run, step
    """
    return list(_chunks(database.connection.execute(query).fetchall()))


def _run_chunks(database: Database, run: str) -> list[Chunk]:
    query = "SELECT run, step, num_tokens, true FROM steps WHERE run = ? ORDER BY step"
    return list(_chunks(database.connection.execute(query, [run]).fetchall()))


def _chunks(steps: list[tuple[str, int, int, bool]]) -> Iterator[Chunk]:
    """Cut (run, step, tokens, wanted) into ranges of wanted steps of about CHUNK_TOKENS; a larger step is one alone."""
    chunk: Chunk | None = None
    for run, step, num_tokens, wanted in steps:
        if chunk and not (wanted and chunk.run == run and chunk.num_tokens + num_tokens <= CHUNK_TOKENS):
            yield chunk
            chunk = None
        if wanted and chunk:
            chunk = Chunk(run, chunk.first_step, step, chunk.num_tokens + num_tokens)
        elif wanted:
            chunk = Chunk(run, step, step, num_tokens)
    if chunk:
        yield chunk


def _runs_without_quantiles(database: Database, pair: Pair) -> list[str]:
    query = f"SELECT run FROM computed_{RUN_QUANTILES.name} WHERE pass_a = ? AND pass_b = ?"
    known = {run for (run,) in database.connection.execute(query, [*pair]).fetchall()}
    return [source.run for source in database.sources if source.run not in known]


def _add_run_quantiles(database: Database, pair: Pair, run: str, chunks: list[Chunk], advance: Advance) -> None:
    def told(queries: list[str]) -> Iterator[str]:
        for chunk, query in zip(chunks, queries, strict=True):
            yield query
            advance(chunk.num_tokens)

    histograms = [_sql("histogram", pair, chunk) for chunk in chunks]
    values = [_sql("bins", pair, chunk, bins="{bins}") for chunk in chunks]
    num_tokens, cuts = exact_quantiles(database.connection, told(histograms), told(values))
    if num_tokens:
        row = [run, *pair, num_tokens, *cuts]
        marks = ", ".join("?" * len(row))
        database.connection.execute(f"INSERT INTO computed_{RUN_QUANTILES.name} VALUES ({marks})", row)


def _sql(name: str, pair: Pair, chunk: Chunk | None = None, **more: str) -> str:
    values = {"a": quoted(pair[0]), "b": quoted(pair[1]), "sum_columns": SUM_COLUMNS, **more}
    if chunk is not None:
        values |= {"run": quoted(chunk.run), "first_step": str(chunk.first_step), "last_step": str(chunk.last_step)}
    return sql_file(name).format(**values)


SUM_COLUMNS = ", ".join(column.name for column in SEQUENCE_SUMS.columns if column.name not in ("pass_a", "pass_b"))
