"""Per-sequence sums of a pair: made from the tokens once, and kept beside the scores."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from ...schemas.layout import SUMS
from ...schemas.sums import KINDS, RUN_QUANTILES, SEQUENCE_SUMS, STEP_HISTOGRAMS, STEP_QUANTILES
from ...schemas.tables import Table
from ...tracer.index import write_index
from ...tracer.parquet_file import write_checked
from ...tracer.progress import Progress, no_progress
from ...tracer.whole_file import unnamed_file
from .database import Database, Traces, quoted, sql_file
from .pair_sums import Sizes, computed, sizes_read
from .quantiles import ERROR, SHARES, Cuts, Gathered, Histogram, quantile_cont, quantiles
from .source import Pair, Source, made_of_metadata, sums_file

MISMATCH: Pair = ("train", "rollout")

_COMPUTED = f"computed_{SEQUENCE_SUMS.name}"
_HISTOGRAMS = f"computed_{STEP_HISTOGRAMS.name}"

CHUNK_TOKENS = 32 << 20
"""Tokens that are worked on at once: their quantiles are taken in memory, 8 bytes each."""

EXACT_TOKENS = 32 << 20
"""Tokens to compare of a run, up to which its quantiles are exact unless asked: they fit in memory, as a chunk does."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A range of steps of one run."""

    run: str
    first_step: int
    last_step: int
    num_tokens: int


def ensure(database: Database, pair: Pair, *, of_run: bool = True, progress: Progress = no_progress) -> bool:
    """Make the database's tables of sums hold every sequence of a pair, and return whether anything was computed.

    Only the tokens of steps that lack sums are read, once. `of_run` asks for quantiles over whole runs too: they are exact
    up to EXACT_TOKENS, for which tokens are read again where the sums of some steps were there before.
    """
    if pair in database.covered and (not of_run or pair in database.run_covered):
        return False
    connection = database.connection
    connection.execute(_sql("missing", pair))
    chunks = _missing_chunks(database)
    whole = _whole_runs(database, chunks)
    sizes: Sizes = []
    with progress("reading tokens", sum(chunk.num_tokens for chunk in chunks)) as advance:
        for number, chunk in enumerate(chunks):
            found = _compute(database, pair, chunk)
            if chunk.run in whole:
                sizes += found
            if chunk.run != (chunks[number + 1].run if number + 1 < len(chunks) else None):
                if chunk.run in whole:
                    _add_quantiles_of(database, pair, chunk.run, sizes)
                sizes = []
            advance(chunk.num_tokens)
    runs = _runs_without_quantiles(database, pair) if of_run else []
    for run in runs:
        _add_run_quantiles(database, pair, run, progress)
    # One order, whatever was kept and what computed now: adding up gives one result.
    connection.execute(f"CREATE OR REPLACE TABLE {_COMPUTED} AS SELECT * FROM {_COMPUTED} ORDER BY ALL")
    database.supersede(pair, run_quantiles=of_run or not _runs_without_quantiles(database, pair))
    return bool(chunks or runs)


def make_exact(database: Database, pair: Pair, progress: Progress = no_progress) -> None:
    """Let the quantiles of runs be exact ones, for which the tokens of those that are not are read once more.

    They are not kept: what the trace answers unasked does not depend on what was asked before.
    """
    ensure(database, pair, progress=progress)
    query = "SELECT run FROM run_quantiles WHERE pass_a = ? AND pass_b = ? AND quantile_error > 0 ORDER BY run"
    runs = [run for (run,) in database.connection.execute(query, [*pair]).fetchall()]
    if not runs:
        return
    query = "SELECT * FROM run_quantiles WHERE pass_a = ? AND pass_b = ?"
    others = [row for row in database.connection.execute(query, [*pair]).fetchall() if row[0] not in runs]
    exact = [_read_again(database, pair, run, "step_histograms", progress) for run in runs]
    database.supersede_runs(pair)
    for run, _, _, num_tokens, *cuts, error in others:
        _put_run_quantiles(database, pair, run, num_tokens, tuple(cuts), error)
    for run, (num_tokens, cuts) in zip(runs, exact, strict=True):
        _put_run_quantiles(database, pair, run, num_tokens, cuts, 0.0)


def _compute(database: Database, pair: Pair, chunk: Chunk) -> Sizes:
    """Add the sums, quantiles and histograms of a range of steps to what was computed, and return |d|."""
    connection = database.connection
    batches, sizes = [], []
    for batch, of_batch in computed(connection, _lists(pair, chunk)):
        batches.append(batch)
        sizes += of_batch
    steps = [(step, abs_d_T, Histogram.of(abs_d_T)) for step, abs_d_T in _by_step(sizes)]
    new = {
        "new_sums": pa.Table.from_batches(batches),
        "new_quantiles": _quantile_rows(steps),
        "new_histograms": _histogram_rows(steps),
    }
    with ExitStack() as registered:
        for name, rows in new.items():
            connection.register(name, rows)
            registered.callback(connection.unregister, name)
        connection.execute(_sql("compute_sums", pair, chunk))
    return sizes


def _by_step(sizes: Sizes) -> Iterator[tuple[int, np.ndarray]]:
    """Step and [T] |d| of all of its tokens, in the order of steps."""
    found: dict[int, list[np.ndarray]] = {}
    for step, abs_d_T in sizes:
        found.setdefault(step, []).append(abs_d_T)
    for step in sorted(found):
        yield step, np.concatenate(found[step])


def _quantile_rows(steps: list[tuple[int, np.ndarray, Histogram]]) -> pa.Table:
    rows = [(step, len(abs_d_T), *quantiles(abs_d_T, bins, quantile_cont)) for step, abs_d_T, bins in steps]
    names = STEP_QUANTILES.schema.names[2:]
    return pa.Table.from_pylist([dict(zip(names, row, strict=True)) for row in rows], _without_pair(STEP_QUANTILES))


def _histogram_rows(steps: list[tuple[int, np.ndarray, Histogram]]) -> pa.Table:
    schema = _without_pair(STEP_HISTOGRAMS)
    parts = [
        pa.table([np.full(len(bins.bins_B), step), bins.bins_B, bins.counts_B], schema=schema)
        for step, _, bins in steps
    ]
    return pa.concat_tables(parts) if parts else schema.empty_table()


def _without_pair(spec: Table) -> pa.Schema:
    return pa.schema([field for field in spec.schema if field.name not in ("pass_a", "pass_b")])


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


def _whole_runs(database: Database, chunks: list[Chunk]) -> set[str]:
    """The runs of which every token is read, and fits in memory."""
    missing: dict[str, int] = {}
    for chunk in chunks:
        missing[chunk.run] = missing.get(chunk.run, 0) + chunk.num_tokens
    query = "SELECT run, sum(num_response_tokens)::BIGINT FROM sequences GROUP BY run"
    totals = dict(database.connection.execute(query).fetchall())
    return {run for run, num_tokens in missing.items() if num_tokens == totals[run] and num_tokens <= EXACT_TOKENS}


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


def _add_quantiles_of(database: Database, pair: Pair, run: str, sizes: Sizes) -> None:
    """Add the exact quantiles of a run from |d| of all of its tokens."""
    abs_d_T = np.concatenate([part for _, part in sizes]) if sizes else np.zeros(0)
    _put_run_quantiles(database, pair, run, len(abs_d_T), quantiles(abs_d_T, Histogram.of(abs_d_T)), 0.0)


def _add_run_quantiles(database: Database, pair: Pair, run: str, progress: Progress) -> None:
    """Add the quantiles of a run from the histograms of its steps: exact ones up to EXACT_TOKENS, which reads tokens."""
    histogram = _histogram_of(database, pair, run, _HISTOGRAMS)
    if histogram.num_values <= EXACT_TOKENS:
        _put_run_quantiles(database, pair, run, *_read_again(database, pair, run, _HISTOGRAMS, progress), 0.0)
        return
    query = f"SELECT max(max_abs_d) FROM {_COMPUTED} WHERE run = ? AND pass_a = ? AND pass_b = ?"
    ((largest,),) = database.connection.execute(query, [run, *pair]).fetchall()
    _put_run_quantiles(database, pair, run, histogram.num_values, histogram.cuts(largest), ERROR)


def _read_again(database: Database, pair: Pair, run: str, histograms: str, progress: Progress) -> tuple[int, Cuts]:
    """The number of a run's tokens, and their exact quantiles: of the bins that hold these the values are read."""
    histogram = _histogram_of(database, pair, run, histograms)
    if not histogram.num_values:
        return 0, tuple(None for _ in SHARES)
    chunks = _run_chunks(database, run)
    gathered = Gathered(histogram)
    with progress("reading tokens", sum(chunk.num_tokens for chunk in chunks)) as advance:
        for chunk in chunks:
            for sizes in sizes_read(database.connection, _lists(pair, chunk)):
                for _, abs_d_T in sizes:
                    gathered.add(abs_d_T)
            advance(chunk.num_tokens)
    return histogram.num_values, gathered.cuts()


def _histogram_of(database: Database, pair: Pair, run: str, table: str) -> Histogram:
    query = f"""
        SELECT bin, sum(num_tokens)::BIGINT AS num_tokens FROM {table}
        WHERE run = ? AND pass_a = ? AND pass_b = ? GROUP BY bin ORDER BY bin
    """
    found = database.connection.execute(query, [run, *pair]).fetchnumpy()
    return Histogram(np.asarray(found["bin"]), np.asarray(found["num_tokens"]))


def _put_run_quantiles(database: Database, pair: Pair, run: str, num_tokens: int, cuts: Cuts, error: float) -> None:
    """Let these be the quantiles of a run; none where it has no token."""
    table = f"computed_{RUN_QUANTILES.name}"
    connection = database.connection
    connection.execute(f"DELETE FROM {table} WHERE run = ? AND pass_a = ? AND pass_b = ?", [run, *pair])
    if num_tokens:
        row = [run, *pair, num_tokens, *cuts, error]
        connection.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row)


def _lists(pair: Pair, chunk: Chunk) -> str:
    a, b, run = quoted(pair[0]), quoted(pair[1]), quoted(chunk.run)
    return f"SELECT * FROM pair_lists({a}, {b}, {run}, {chunk.first_step}, {chunk.last_step})"


def _sql(name: str, pair: Pair, chunk: Chunk | None = None) -> str:
    values = {"a": quoted(pair[0]), "b": quoted(pair[1]), "sum_columns": SUM_COLUMNS}
    if chunk is not None:
        values["run"] = quoted(chunk.run)
    return sql_file(name).format(**values)


SUM_COLUMNS = ", ".join(column.name for column in SEQUENCE_SUMS.columns if column.name not in ("pass_a", "pass_b"))
