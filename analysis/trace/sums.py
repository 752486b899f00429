"""Per-sequence sums of a pair: made from the tokens once, and kept beside the scores."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import numpy as np
import pyarrow as pa

from ...schemas.layout import SUMS
from ...schemas.sums import (
    OF_RUNS,
    RUN_QUANTILES,
    RUN_STATISTICS,
    SEQUENCE_SUMS,
    STATISTICS,
    STEP_HISTOGRAMS,
    STEP_QUANTILES,
    STEP_STATISTICS,
)  # fmt: skip
from ...schemas.tables import Table
from ...tracer.index import write_index
from ...tracer.parquet_file import write_checked
from ...tracer.progress import Progress, no_progress
from ...tracer.whole_file import unnamed_file
from .computed import IN_FILES, SUMS_OPTIONS, ComputedFile, sums_schema
from .database import Database, Traces, sql_file, statistics_of_groups
from .pair_sums import Sizes, computed, sizes_read
from .quantiles import ERROR, SHARES, Cuts, Gathered, Histogram, merged, quantile_cont, quantiles
from .quoting import quoted
from .source import Pair, Source, sums_file
from .spread import spread, unit_tokens

Write = Callable[[pa.Table], None]

MISMATCH: Pair = ("train", "rollout")

CHUNK_TOKENS = 32 << 20
"""Tokens that are worked on at once: their quantiles are taken in memory, 8 bytes each."""

CHUNK_SEQUENCES = 1 << 18
"""Sequences that are worked on at once: their sums take 0.2 KB each."""

EXACT_TOKENS = 32 << 20
"""Tokens to compare of a run, up to which its quantiles are exact unless asked: they fit in memory, as a chunk does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _ChunkSums:
    """What the tokens of a range of steps give."""

    sums: pa.Table
    """Of its sequences, in order."""
    histograms: pa.Table
    """Of its steps."""
    quantiles: pa.Table
    """Of its steps, exact ones."""
    sizes: Sizes
    """|d| of its tokens, where the quantiles of the run are taken of them; else none."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A range of steps of one run."""

    run: str
    first_step: int
    last_step: int
    num_tokens: int
    num_sequences: int
    is_missing: bool
    """Whether its sums are computed; else they are kept ones."""

    @property
    def mean_tokens(self) -> float:
        """Tokens of a sequence."""
        return self.num_tokens / max(self.num_sequences, 1)


def ensure(database: Database, pair: Pair, *, of_run: bool = True, progress: Progress = no_progress) -> bool:
    """Make the database's tables of sums hold every sequence of a pair, and return whether anything was computed.

    Only the tokens of steps that lack sums are read, once. `of_run` asks for quantiles over whole runs too: they are exact
    up to EXACT_TOKENS, for which tokens are read again where the sums of some steps were there before.
    """
    if pair in database.covered and (not of_run or pair in database.run_covered):
        return False
    has_computed = pair not in database.covered
    if has_computed:
        _cover(database, pair, progress)
        database.supersede(pair)
    runs = _runs_without_quantiles(database, pair)
    if has_computed:
        _add_step_statistics(database, pair)
    if of_run:
        for run in runs:
            _add_run_quantiles(database, pair, run, progress)
        _add_run_statistics(database, pair)
    database.supersede_runs(pair, covered=of_run)
    return has_computed or bool(runs)


def _add_step_statistics(database: Database, pair: Pair) -> None:
    """Add the statistics of each step, from its sequences' sums."""
    a, b = quoted(pair[0]), quoted(pair[1])
    for source in database.sources:
        for chunk in run_chunks(database, source.run):
            groups = f"group_statistics({a}, {b}, true, {quoted(source.run)}, {chunk.first_step}, {chunk.last_step})"
            _insert(database, STEP_STATISTICS, pair, f"SELECT run, step, {', '.join(STATISTICS)} FROM {groups}")


def _add_run_statistics(database: Database, pair: Pair) -> None:
    """Add the statistics of each run, from its sequences' sums."""
    for source in database.sources:
        values = {"a": quoted(pair[0]), "b": quoted(pair[1]), "run": quoted(source.run)}
        database.connection.execute(sql_file("run_tops").format(**values))
        groups = statistics_of_groups(sql_file("grouped_run").format(**values))
        _insert(database, RUN_STATISTICS, pair, f"SELECT run, {', '.join(STATISTICS)} FROM ({groups})")


def _insert(database: Database, spec: Table, pair: Pair, rows: str) -> None:
    """Add rows of run and the columns behind the pair to what was computed; one thread adds in one order."""
    connection = database.connection
    connection.execute("SET threads = 1")
    columns = ", ".join(name for name in spec.schema.names if name not in ("pass_a", "pass_b"))
    a, b = quoted(pair[0]), quoted(pair[1])
    connection.execute(
        f"INSERT INTO computed_{spec.name} BY NAME SELECT {a} AS pass_a, {b} AS pass_b, run, {columns} FROM ({rows})"
    )


def _cover(database: Database, pair: Pair, progress: Progress) -> None:
    """Write the sums, quantiles and histograms of every step, kept ones and those computed from tokens, in one order.

    Adding up gives one result then, whatever was kept.
    """
    database.begin_sums(pair)
    chunks = _marked_chunks(database, pair)
    # |d| of tokens is taken along where it is of a whole run, and is where the quantiles are made.
    whole = _whole_runs(chunks) if database.ray is None else set()
    units = [(pair, chunk, chunk.run in whole) for chunk in chunks if chunk.is_missing]
    computed_units = spread(database, _compute, units)
    with progress("reading tokens", sum(chunk.num_tokens for _, chunk, _ in units)) as advance:
        for source in database.sources:
            sizes: Sizes = []
            files = database.computed
            with (
                files.writing(source, SEQUENCE_SUMS, pair) as write_sums,
                files.writing(source, STEP_HISTOGRAMS, pair) as write_histograms,
            ):
                for chunk in chunks:
                    if chunk.run != source.run:
                        continue
                    if not chunk.is_missing:
                        _copy(database, pair, chunk, write_sums, write_histograms)
                        continue
                    found = next(computed_units)
                    write_sums(found.sums)
                    write_histograms(found.histograms)
                    _add_step_quantiles(database, chunk.run, found.quantiles)
                    sizes += found.sizes
                    advance(chunk.num_tokens)
            if source.run in whole:
                _add_quantiles_of(database, pair, source.run, sizes)


def _compute(database: Database, unit: tuple[Pair, Chunk, bool]) -> Iterator[_ChunkSums]:
    """The sums, histograms and quantiles of a range of steps, and |d| of its tokens where it is wanted."""
    pair, chunk, wants_sizes = unit
    batches, sizes = [], []
    for batch, of_batch in computed(database.connection, _lists(pair, chunk), chunk.mean_tokens):
        batches.append(batch)
        sizes += of_batch
    a, b = quoted(pair[0]), quoted(pair[1])
    with _registered(database, pa.Table.from_batches(batches)) as name:
        query = f"SELECT {a} AS pass_a, {b} AS pass_b, {SUM_COLUMNS} FROM {name} ORDER BY ALL"
        sums = database.connection.sql(query).to_arrow_table()
    steps = [(step, abs_d_T, Histogram.of(abs_d_T)) for step, abs_d_T in _by_step(sizes)]
    yield _ChunkSums(
        sums=sums,
        histograms=_with_pair(_histogram_rows(steps), pair),
        quantiles=_with_pair(_quantile_rows(steps), pair),
        sizes=sizes if wants_sizes else [],
    )


def _add_step_quantiles(database: Database, run: str, rows: pa.Table) -> None:
    with _registered(database, rows) as name:
        columns = ", ".join(STEP_QUANTILES.schema.names)
        database.connection.execute(
            f"INSERT INTO computed_{STEP_QUANTILES.name} SELECT {quoted(run)}, {columns} FROM {name}"
        )


def _copy(database: Database, pair: Pair, chunk: Chunk, write_sums: Write, write_histograms: Write) -> None:
    """Write what is kept of a range of steps, which stays right."""
    connection = database.connection
    a, b, run = quoted(pair[0]), quoted(pair[1]), quoted(chunk.run)
    within = f"pass_a = {a} AND pass_b = {b} AND run = {run} AND step BETWEEN {chunk.first_step} AND {chunk.last_step}"
    for spec, write in ((SEQUENCE_SUMS, write_sums), (STEP_HISTOGRAMS, write_histograms)):
        columns = ", ".join(spec.schema.names)
        write(connection.sql(f"SELECT {columns} FROM {spec.name} WHERE {within} ORDER BY ALL").to_arrow_table())
    # One statement reads the view before it writes.
    connection.execute(f"INSERT INTO computed_{STEP_QUANTILES.name} SELECT * FROM {STEP_QUANTILES.name} WHERE {within}")


@contextmanager
def _registered(database: Database, rows: pa.Table) -> Iterator[str]:
    """The name under which queries read these rows meanwhile."""
    database.connection.register("new_rows", rows)
    try:
        yield "new_rows"
    finally:
        database.connection.unregister("new_rows")


def _with_pair(rows: pa.Table, pair: Pair) -> pa.Table:
    for place, name in enumerate(pair):
        column = pa.array([name]).take(pa.array(np.zeros(rows.num_rows, np.int8)))
        rows = rows.add_column(place, ("pass_a", "pass_b")[place], column)
    return rows


def make_exact(database: Database, pair: Pair, progress: Progress = no_progress) -> None:
    """Let the quantiles of runs be exact ones, for which the tokens of those that are not are read once more.

    They are not kept: what the trace answers unasked does not depend on what was asked before.
    """
    ensure(database, pair, progress=progress)
    query = "SELECT run FROM run_quantiles WHERE pass_a = ? AND pass_b = ? AND quantile_error > 0 ORDER BY run"
    runs = [run for (run,) in database.connection.execute(query, [*pair]).fetchall()]
    if not runs:
        return
    if not database.is_computed(pair, of_runs=True):
        for source in database.sources:
            for spec in OF_RUNS:
                _take_kept(database, spec, pair, source.run)
    for run in runs:
        _put_run_quantiles(database, pair, run, *_read_again(database, pair, run, progress), 0.0)
    database.supersede_runs(pair, covered=True)


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
        if database.is_computed(pair):
            for file in database.computed.files:
                if file.pair == pair and file.run == source.run:
                    _place(source, file)
            _write(database, pair, source, STEP_QUANTILES)
            _write(database, pair, source, STEP_STATISTICS)
        if pair in database.run_covered:
            for spec in OF_RUNS:
                _write(database, pair, source, spec)
        write_index(Path(source.store.root))
    except OSError:
        return False
    return True


def _place(source: Source, file: ComputedFile) -> None:
    """Keep a file of sums that was written for a trace."""
    folder = Path(source.store.root)
    with unnamed_file(folder, SUMS) as temporary:
        shutil.copyfile(file.path, temporary)
        temporary.rename(folder / file.relative)
    _remove_outdated(source, pair=file.pair, kind=file.kind)


def _write(database: Database, pair: Pair, source: Source, spec: Table) -> None:
    assert spec not in IN_FILES
    columns = ", ".join(column.name for column in spec.columns)
    rows = database.connection.sql(
        f"SELECT {columns} FROM computed_{spec.name} WHERE run = ? AND pass_a = ? AND pass_b = ? ORDER BY ALL",
        params=[source.run, *pair],
    ).to_arrow_table()
    write_sums(source, pair, spec, rows)


def write_sums(source: Source, pair: Pair, spec: Table, rows: pa.Table) -> None:
    """Keep sums of a pair that are of all sealed rows of a local trace."""
    schema = sums_schema(source, pair, spec)
    folder = Path(source.store.root)
    with unnamed_file(folder, SUMS) as temporary:
        written = write_checked(temporary, f"{SUMS}/{spec.name}", schema, [rows.cast(schema)], **SUMS_OPTIONS)
        assert written.footer is not None
        temporary.rename(folder / sums_file(spec.name, written.footer))
    _remove_outdated(source, pair, spec.name)


def _remove_outdated(source: Source, pair: Pair, kind: str) -> None:
    """Remove the sums in whose place better ones lay: what was used until now stays for who reads it just now."""
    for relative in source.outdated_sums.get((kind, pair), []):
        Path(source.store.root, relative).unlink(missing_ok=True)


def _marked_chunks(database: Database, pair: Pair) -> list[Chunk]:
    """Ranges of all steps, cut where kept sums end or begin."""
    query = """
        SELECT run, step, sum(num_response_tokens)::BIGINT, count(*) FROM sequences GROUP BY run, step ORDER BY run, step
    """
    steps = [
        Chunk(run, step, step, num_tokens, num_sequences, True)
        for run, step, num_tokens, num_sequences in database.connection.execute(query).fetchall()
    ]
    query = "SELECT DISTINCT run FROM sequence_sums WHERE pass_a = ? AND pass_b = ?"
    kept = {run for (run,) in database.connection.execute(query, [*pair]).fetchall()}
    missing = {
        (chunk.run, step)
        for chunk in _joined((step for step in steps if step.run in kept), CHUNK_TOKENS)
        for (step,) in database.connection.execute(_missing(pair, chunk)).fetchall()
    }
    marked = [
        replace(step, is_missing=step.run not in kept or (step.run, step.first_step) in missing) for step in steps
    ]
    return list(_joined(marked, _most_tokens(database, marked)))


def _missing(pair: Pair, chunk: Chunk) -> str:
    return sql_file("missing").format(
        a=quoted(pair[0]),
        b=quoted(pair[1]),
        run=quoted(chunk.run),
        first_step=chunk.first_step,
        last_step=chunk.last_step,
    )


def _most_tokens(database: Database, steps: Sequence[Chunk]) -> int:
    """Tokens that are worked on at once, of these."""
    return unit_tokens(database, CHUNK_TOKENS, sum(step.num_tokens for step in steps))


def _joined(steps: Iterable[Chunk], most_tokens: int) -> Iterator[Chunk]:
    """Join neighbouring steps of one kind to ranges of about so many tokens or CHUNK_SEQUENCES; a larger step is one alone."""
    for _, of_kind in groupby(steps, key=lambda step: (step.run, step.is_missing)):
        chunk: Chunk | None = None
        for step in of_kind:
            if chunk is None:
                chunk = step
                continue
            num_tokens, num_sequences = chunk.num_tokens + step.num_tokens, chunk.num_sequences + step.num_sequences
            if num_tokens > most_tokens or num_sequences > CHUNK_SEQUENCES:
                yield chunk
                chunk = step
                continue
            chunk = replace(chunk, last_step=step.last_step, num_tokens=num_tokens, num_sequences=num_sequences)
        if chunk is not None:
            yield chunk


def _whole_runs(chunks: list[Chunk]) -> set[str]:
    """The runs of which every token is read, and fits in memory."""
    found = set()
    for run, of_run in groupby(chunks, key=lambda chunk: chunk.run):
        parts = list(of_run)
        if all(part.is_missing for part in parts) and sum(part.num_tokens for part in parts) <= EXACT_TOKENS:
            found.add(run)
    return found


def run_chunks(database: Database, run: str) -> list[Chunk]:
    """The steps of a run in ranges that are worked on at once, here or on a cluster."""
    query = """
        SELECT step, sum(num_response_tokens)::BIGINT, count(*) FROM sequences WHERE run = ? GROUP BY step ORDER BY step
    """
    steps = [
        Chunk(run, step, step, num_tokens, num_sequences, True)
        for step, num_tokens, num_sequences in database.connection.execute(query, [run]).fetchall()
    ]
    return list(_joined(steps, _most_tokens(database, steps)))


def _runs_without_quantiles(database: Database, pair: Pair) -> list[str]:
    """The runs that have none, once those are taken that traces keep and that are of all they hold."""
    table = f"computed_{RUN_QUANTILES.name}"
    query = f"SELECT run FROM {table} WHERE pass_a = ? AND pass_b = ?"
    known = {run for (run,) in database.connection.execute(query, [*pair]).fetchall()}
    for source in database.sources:
        if source.run not in known and database.is_whole and pair in source.run_covered:
            known.add(source.run)
            _take_kept(database, RUN_QUANTILES, pair, source.run)
    return [source.run for source in database.sources if source.run not in known]


def _take_kept(database: Database, spec: Table, pair: Pair, run: str) -> None:
    """Let what a trace keeps of a run be among what was computed here."""
    database.connection.execute(f"INSERT INTO computed_{spec.name} {database.kept_sums(spec, pair, run)}")


def _add_quantiles_of(database: Database, pair: Pair, run: str, sizes: Sizes) -> None:
    """Add the exact quantiles of a run from |d| of all of its tokens, which stay in the parts in which they were read."""
    histogram = merged(Histogram.of(part) for _, part in sizes)
    gathered = Gathered(histogram)
    for _, part in sizes:
        gathered.add(part)
    _put_run_quantiles(database, pair, run, histogram.num_values, gathered.cuts(), 0.0)


def _add_run_quantiles(database: Database, pair: Pair, run: str, progress: Progress) -> None:
    """Add the quantiles of a run from the histograms of its steps: exact ones up to EXACT_TOKENS, which reads tokens."""
    histogram = _histogram_of(database, pair, run)
    if histogram.num_values <= EXACT_TOKENS:
        _put_run_quantiles(database, pair, run, *_read_again(database, pair, run, progress), 0.0)
        return
    query = f"SELECT max(max_abs_d) FROM {SEQUENCE_SUMS.name} WHERE run = ? AND pass_a = ? AND pass_b = ?"
    ((largest,),) = database.connection.execute(query, [run, *pair]).fetchall()
    _put_run_quantiles(database, pair, run, histogram.num_values, histogram.cuts(largest), ERROR)


def _read_again(database: Database, pair: Pair, run: str, progress: Progress) -> tuple[int, Cuts]:
    """The number of a run's tokens, and their exact quantiles: of the bins that hold these the values are read."""
    histogram = _histogram_of(database, pair, run)
    if not histogram.num_values:
        return 0, tuple(None for _ in SHARES)
    chunks = run_chunks(database, run)
    gathered = Gathered(histogram)
    parts = spread(database, _gather, [(pair, chunk, histogram) for chunk in chunks])
    with progress("reading tokens", sum(chunk.num_tokens for chunk in chunks)) as advance:
        for chunk, part in zip(chunks, parts, strict=True):
            gathered.take(part)
            advance(chunk.num_tokens)
    return histogram.num_values, gathered.cuts()


def _gather(database: Database, unit: tuple[Pair, Chunk, Histogram]) -> Iterator[Gathered]:
    """The values of a range of steps in the bins of the run's quantiles."""
    pair, chunk, histogram = unit
    gathered = Gathered(histogram)
    for sizes in sizes_read(database.connection, _lists(pair, chunk), chunk.mean_tokens):
        for _, abs_d_T in sizes:
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


SUM_COLUMNS = ", ".join(column.name for column in SEQUENCE_SUMS.columns if column.name not in ("pass_a", "pass_b"))
