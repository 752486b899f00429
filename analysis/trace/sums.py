"""Per-sequence sums for a pair of passes, computed from tokens once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from ...schemas.sums import (
    RUN_QUANTILES,
    RUN_STATISTICS,
    SEQUENCE_SUMS,
    STATISTICS,
    STEP_HISTOGRAMS,
    STEP_QUANTILES,
    STEP_STATISTICS,
)  # fmt: skip
from ...schemas.tables import Table
from ...tracer.progress import Progress, no_progress
from .chunks import Chunk, Unit, chunks_of, marked_chunks, run_chunks, steps_of, units_of
from .database import Database
from .macros import quoted, quoted_pair, sql_file
from .pair_sums import computed, sizes_read
from .quantiles import ERROR, SHARES, Gathered, Histogram, merged, quantile_cont, quantiles
from .ragged import array_of
from .source import Pair, Source, Traces
from .sum_tables import by_run, without_pair
from .tokens import spread

Write = Callable[[pa.Table], None]

MISMATCH: Pair = ("train", "rollout")

EXACT_TOKENS = 32 << 20
"""Runs with up to this many tokens get exact quantiles by default, because their |d| fits in memory."""


Quantiles = tuple[str | float | None, ...]
"""A run, and its columns in STEP_QUANTILES or RUN_QUANTILES."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _ChunkSums:
    sums: pa.Table
    histograms: pa.Table
    quantiles: list[Quantiles]
    sizes: list[np.ndarray]


def ensure(database: Database, pair: Pair, *, of_run: bool = True, progress: Progress = no_progress) -> bool:
    """Compute a pair's missing sums. Return True if anything was computed. `of_run` adds quantiles over whole runs,
    which are exact up to EXACT_TOKENS tokens."""
    has_computed = not database.sums.covers(pair)
    if not has_computed and (not of_run or database.sums.covers(pair, runs=True)):
        return False
    steps = steps_of(database)
    if has_computed:
        _cover(database, pair, steps, progress)
        database.supersede(pair)
    runs = _runs_without_quantiles(database, pair)
    units = units_of(database, chunks_of(database, steps))
    if has_computed:
        _add_step_statistics(database, pair, units)
    if of_run:
        _put_run_quantiles(database, pair, [_run_quantiles(database, pair, run, progress) for run in runs])
        _add_run_statistics(database, pair, units)
        database.supersede(pair, runs=True)
    return has_computed or bool(runs)


def summarize(traces: Traces | Sequence[Source], *, pair: Pair = MISMATCH, progress: Progress = no_progress) -> bool:
    """Store a pair's per-sequence sums next to the scores, so that statistics need not read tokens. Return True if
    sums were written. Nothing is written if they exist, or if the trace is live or read-only."""
    database = Database(traces)
    return ensure(database, pair, progress=progress) and database.sums.keep(pair)


def _add_step_statistics(database: Database, pair: Pair, units: Sequence[Unit]) -> None:
    for unit in units:
        groups = f"group_statistics({quoted_pair(pair)}, true, {_within(unit)})"
        _insert(database, STEP_STATISTICS, pair, f"SELECT run, step, {', '.join(STATISTICS)} FROM {groups}")


def _add_run_statistics(database: Database, pair: Pair, units: Sequence[Unit]) -> None:
    for runs in dict.fromkeys(tuple(chunk.run for chunk in unit) for unit in units):
        values = {"a": quoted(pair[0]), "b": quoted(pair[1]), "runs": _listed(runs)}
        groups = sql_file("group_statistics").format(rows=sql_file("grouped_run").format(**values))
        _insert(database, RUN_STATISTICS, pair, f"SELECT run, {', '.join(STATISTICS)} FROM ({groups})")


def _insert(database: Database, spec: Table, pair: Pair, rows: str) -> None:
    connection = database.connection
    connection.execute("SET threads = 1")  # preserves the row order
    columns = ", ".join([_pair_columns(pair), "run", *without_pair(spec)])
    connection.execute(f"INSERT INTO computed_{spec.name} BY NAME SELECT {columns} FROM ({rows})")


def _pair_columns(pair: Pair) -> str:
    return f"{quoted(pair[0])} AS pass_a, {quoted(pair[1])} AS pass_b"


def _cover(database: Database, pair: Pair, steps: Sequence[Chunk], progress: Progress) -> None:
    """Write all sums in a fixed order, so that totals do not depend on which sums were already stored."""
    database.sums.forget(pair)
    chunks = marked_chunks(database, pair, steps)
    # Keep |d| only for runs that this process reads in full.
    whole = _whole_runs(chunks) if database.ray is None else set()
    missing = [chunk for chunk in chunks if chunk.is_missing]
    computed_chunks = spread(database, _compute, [(pair, unit, whole) for unit in units_of(database, missing)])
    step_quantiles: list[Quantiles] = []
    run_quantiles: list[Quantiles] = []
    with progress("reading tokens", sum(chunk.num_tokens for chunk in missing)) as advance:
        for source in database.sources:
            sizes: list[np.ndarray] = []
            with (
                database.sums.writing(source, SEQUENCE_SUMS, pair) as write_sums,
                database.sums.writing(source, STEP_HISTOGRAMS, pair) as write_histograms,
            ):
                for chunk in chunks:
                    if chunk.run != source.run:
                        continue
                    if not chunk.is_missing:
                        _copy(database, pair, chunk, write_sums, write_histograms)
                        continue
                    found = next(computed_chunks)
                    write_sums(found.sums)
                    write_histograms(found.histograms)
                    step_quantiles += found.quantiles
                    sizes += found.sizes
                    advance(chunk.num_tokens)
            if source.run in whole:
                histogram = merged(map(Histogram.of, sizes))
                cuts = quantiles(sizes, histogram)
                run_quantiles.append((source.run, histogram.num_values, *cuts, 0.0))
    _put(database, STEP_QUANTILES, pair, step_quantiles)
    _put_run_quantiles(database, pair, run_quantiles)


def _compute(database: Database, asked: tuple[Pair, Unit, set[str]]) -> Iterator[_ChunkSums]:
    pair, unit, wants_sizes = asked
    batches: list[pa.RecordBatch] = []
    sizes: dict[str, dict[int, list[np.ndarray]]] = {chunk.run: {} for chunk in unit}
    for batch, of_batch in computed(database.connection, _lists(pair, unit), _mean_tokens(unit)):
        batches.append(batch)
        for run, step, abs_d_T in of_batch:
            sizes[run].setdefault(step, []).append(abs_d_T)
    with database.connection.registered("new_rows", pa.Table.from_batches(batches)):
        query = (
            f"SELECT run, {_pair_columns(pair)}, {', '.join(without_pair(SEQUENCE_SUMS))} FROM new_rows ORDER BY ALL"
        )
        sums = by_run(database.connection.sql(query).to_arrow_table(), sizes)
    for chunk in unit:
        kept = [step for step in sorted(sizes[chunk.run]) if chunk.first_step <= step <= chunk.last_step]
        parts = {step: sizes[chunk.run][step] for step in kept}
        steps = [(step, np.concatenate(parts[step])) for step in parts]
        histograms = [(step, abs_d_T, Histogram.of(abs_d_T)) for step, abs_d_T in steps]
        yield _ChunkSums(
            sums=_of_steps(sums[chunk.run], chunk),
            histograms=_histogram_rows(pair, histograms),
            quantiles=[
                (chunk.run, step, len(abs_d_T), *quantiles([abs_d_T], bins, quantile_cont))
                for step, abs_d_T, bins in histograms
            ],
            sizes=[part for step in parts for part in parts[step]] if chunk.run in wants_sizes else [],
        )


def _of_steps(rows: pa.Table, chunk: Chunk) -> pa.Table:
    steps = array_of(rows["step"])
    first, end = np.searchsorted(steps, chunk.first_step), np.searchsorted(steps, chunk.last_step, side="right")
    return rows.slice(first, end - first)


def _copy(database: Database, pair: Pair, chunk: Chunk, write_sums: Write, write_histograms: Write) -> None:
    connection = database.connection
    a, b, run = quoted(pair[0]), quoted(pair[1]), quoted(chunk.run)
    within = f"pass_a = {a} AND pass_b = {b} AND run = {run} AND step BETWEEN {chunk.first_step} AND {chunk.last_step}"
    for spec, write in ((SEQUENCE_SUMS, write_sums), (STEP_HISTOGRAMS, write_histograms)):
        columns = ", ".join(spec.schema.names)
        write(connection.sql(f"SELECT {columns} FROM {spec.name} WHERE {within} ORDER BY ALL").to_arrow_table())
    # Inserting into a table while reading it through the view is safe, because DuckDB first reads the whole view.
    connection.execute(f"INSERT INTO computed_{STEP_QUANTILES.name} SELECT * FROM {STEP_QUANTILES.name} WHERE {within}")


def _histogram_rows(pair: Pair, steps: list[tuple[int, np.ndarray, Histogram]]) -> pa.Table:
    schema = pa.schema([STEP_HISTOGRAMS.schema.field(name) for name in without_pair(STEP_HISTOGRAMS)])
    parts = [
        pa.table([np.full(len(bins.bins_B), step), bins.bins_B, bins.counts_B], schema=schema)
        for step, _, bins in steps
    ]
    rows = pa.concat_tables(parts) if parts else schema.empty_table()
    names = [pa.array([name]).take(pa.array(np.zeros(rows.num_rows, np.int8))) for name in pair]
    return pa.table([*names, *rows.columns], names=STEP_HISTOGRAMS.schema.names)


def _whole_runs(chunks: list[Chunk]) -> set[str]:
    num_tokens = Counter[str]()
    for chunk in chunks:
        num_tokens[chunk.run] += chunk.num_tokens
    read_in_part = {chunk.run for chunk in chunks if not chunk.is_missing}
    return {run for run, number in num_tokens.items() if number <= EXACT_TOKENS} - read_in_part


def _runs_without_quantiles(database: Database, pair: Pair) -> list[str]:
    table = f"computed_{RUN_QUANTILES.name}"
    query = f"SELECT run FROM {table} WHERE pass_a = ? AND pass_b = ?"
    known = {run for (run,) in database.connection.execute(query, [*pair]).fetchall()}
    kept = [source.run for source in database.sources if source.run not in known and pair in source.run_covered]
    if database.views.is_whole and kept:
        database.connection.execute(f"INSERT INTO {table} {database.sums.kept(RUN_QUANTILES, pair, kept)}")
        known |= {*kept}
    return [source.run for source in database.sources if source.run not in known]


def _run_quantiles(database: Database, pair: Pair, run: str, progress: Progress) -> Quantiles:
    histogram = _histogram_of(database, pair, run)
    if histogram.num_values > EXACT_TOKENS:
        query = f"SELECT max(max_abs_d) FROM {SEQUENCE_SUMS.name} WHERE run = ? AND pass_a = ? AND pass_b = ?"
        ((largest,),) = database.connection.execute(query, [run, *pair]).fetchall()
        return run, histogram.num_values, *histogram.cuts(largest), ERROR
    if not histogram.num_values:
        return run, 0, *(None for _ in SHARES), 0.0
    chunks = run_chunks(database, run)
    gathered = Gathered(histogram)
    parts = spread(database, _gather, [(pair, chunk, histogram) for chunk in chunks])
    with progress("reading tokens", sum(chunk.num_tokens for chunk in chunks)) as advance:
        for chunk, part in zip(chunks, parts, strict=True):
            gathered.take(part)
            advance(chunk.num_tokens)
    return run, histogram.num_values, *gathered.cuts(), 0.0


def _gather(database: Database, unit: tuple[Pair, Chunk, Histogram]) -> Iterator[Gathered]:
    pair, chunk, histogram = unit
    gathered = Gathered(histogram)
    for sizes in sizes_read(database.connection, _lists(pair, (chunk,)), _mean_tokens((chunk,))):
        for _, _, abs_d_T in sizes:
            gathered.add(abs_d_T)
    gathered.count()
    yield gathered


def _histogram_of(database: Database, pair: Pair, run: str) -> Histogram:
    query = f"""
        SELECT bin, sum(num_tokens)::BIGINT AS num_tokens FROM {STEP_HISTOGRAMS.name}
        WHERE run = ? AND pass_a = ? AND pass_b = ? GROUP BY bin ORDER BY bin
    """
    found = database.connection.execute(query, [run, *pair]).fetchnumpy()
    return Histogram(np.asarray(found["bin"]), np.asarray(found["num_tokens"]))


def _put_run_quantiles(database: Database, pair: Pair, rows: Sequence[Quantiles]) -> None:
    where = f"pass_a = ? AND pass_b = ? AND run IN {_listed(str(run) for run, *_ in rows)}"
    database.connection.execute(f"DELETE FROM computed_{RUN_QUANTILES.name} WHERE {where}", [*pair])
    _put(database, RUN_QUANTILES, pair, [row for row in rows if row[1]])


def _put(database: Database, spec: Table, pair: Pair, rows: Sequence[Quantiles]) -> None:
    schema = pa.schema([pa.field("run", pa.string()), *(spec.schema.field(name) for name in without_pair(spec))])
    table = pa.Table.from_pylist([dict(zip(schema.names, row, strict=True)) for row in rows], schema)
    with database.connection.registered("new_rows", table):
        _insert(database, spec, pair, "SELECT * FROM new_rows")


def _lists(pair: Pair, unit: Unit) -> str:
    return f"SELECT * EXCLUDE (advantage, advantages) FROM pair_lists({quoted_pair(pair)}, {_within(unit)})"


def _within(unit: Unit) -> str:
    first, last = min(chunk.first_step for chunk in unit), max(chunk.last_step for chunk in unit)
    return f"{_listed(chunk.run for chunk in unit)}, {first}, {last}"


def _listed(runs: Iterable[str]) -> str:
    return f"[{', '.join(quoted(run) for run in runs)}]::VARCHAR[]"


def _mean_tokens(unit: Unit) -> float:
    return sum(chunk.num_tokens for chunk in unit) / max(sum(chunk.num_sequences for chunk in unit), 1)
