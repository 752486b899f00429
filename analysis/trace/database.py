"""Open one or more traces as a DuckDB database of views and macros, without copying data."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from threading import Event, Thread
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from ...schemas.errors import DamagedTrace, QueryFailed, TimTraceError, option, tell_damage
from ...schemas.steps import ALL_STEPS
from ...tracer.parquet_file import TraceFiles
from ...tracer.progress import Progress, no_progress
from ...tracer.store import first_line
from ...tracer.verified_file import FileCursor
from ..rows import Rows
from . import pair_sums
from .connection import Connection
from .macros import Catalogue, MacroFile, sql_file
from .source import Pair, Source, Traces, open_sources
from .sum_tables import SumTables
from .table_views import TableViews, step_condition

Asked = ParamSpec("Asked")
Found = TypeVar("Found")

_LOOK_EVERY_S = 0.1


class Database:
    def __init__(
        self, traces: Traces | Source | Sequence[Source] | Database, steps: str = ALL_STEPS, *, ray: str | None = None,
        catalogue: Callable[[], Catalogue[Database]] | None = None,
    ):  # fmt: skip
        """Examine the traces and define their views. `steps` limits the views, but hyperparameters from earlier steps
        are kept. If `traces` is a Database, its sources are reused. `ray` is a Ray cluster's address. Without a
        `catalogue`, only the core macros are available. Raises InvalidOption if a trace has none of the steps."""
        if isinstance(traces, Database):
            catalogue = catalogue or traces.catalogue
        self.catalogue: Callable[[], Catalogue[Database]] = catalogue or core_catalogue
        looked_at = _looked_at(traces)
        self.sources = looked_at or open_sources(cast("Traces", traces))
        self.given = tuple(source.store.url for source in self.sources)
        self.files = TraceFiles()
        self.connection = Connection(duckdb.connect(), self._explained)
        self.function_errors: list[Callable[[], TimTraceError | None]] = []
        """Functions that return the error raised by Python code in a query. DuckDB keeps only the error's message."""
        self._defined: set[str] = set()
        self.steps = steps
        self.kept_steps: dict[str, list[int]] = {}
        """Steps in the views, by run. Empty if the views contain all steps."""
        self.memory: dict[object, Any] = {}  # results of any `cached` function
        self.progress: Progress = no_progress
        self.ray = ray
        self.connection.register_filesystem(self.files)
        self.connection.execute("SET parquet_metadata_cache = true")  # a trace's files never change
        if all(source.store.is_local for source in self.sources):  # prefetching would read 1 MB per list column
            self.connection.execute("SET disable_parquet_prefetching = true")
        self.views = TableViews(self.connection, self.sources, self.files)
        self.sums = SumTables(self.connection, self.views, self.sources)
        self.connection.define_named = self.define_named
        self.connection.choose_files = self.views.choose_files
        if steps != ALL_STEPS:
            self.kept_steps, condition = self.views.choose_steps(steps)
            self.sums.narrow(condition)
        if self.damaged and not looked_at:
            tell_damage(self.damaged)

    @contextmanager
    def telling(self, progress: Progress) -> Iterator[None]:
        before, self.progress = self.progress, progress
        try:
            yield
        finally:
            self.progress = before

    @contextmanager
    def following(self, what: str) -> Iterator[None]:
        if self.progress is no_progress:
            yield
            return
        raw, ended = self.connection.raw, Event()
        raw.execute("SET enable_progress_bar = true; SET enable_progress_bar_print = false")
        with self.progress(what, 100) as advance:
            told = 0

            def tell() -> None:
                nonlocal told
                while not ended.wait(_LOOK_EVERY_S):
                    if (now := int(raw.query_progress())) > told:
                        advance(now - told)
                        told = now

            watcher = Thread(target=tell, name="following", daemon=True)
            watcher.start()
            try:
                yield
            finally:
                ended.set()
                watcher.join()
            advance(100 - told)

    @property
    def damaged(self) -> tuple[str, ...]:
        """One sentence per unreadable or missing part. These parts are excluded from every result."""
        return tuple(dict.fromkeys(sentence for source in self.sources for sentence in source.damaged))

    def check_whole(self, *, partial: bool) -> None:
        if self.damaged and not partial:
            more = f" (and {len(self.damaged) - 1} more: tim-trace verify lists them)" if len(self.damaged) > 1 else ""
            raise DamagedTrace(
                f"the trace is damaged or incomplete, so a verdict on the rest would be unreliable: "
                f"{self.damaged[0]}{more}; restore the trace, or use {option('partial')} to analyze the rest anyway"
            )

    def define_named(self, words: frozenset[str]) -> None:
        for file in self.catalogue().needed(words):
            if file.name not in self._defined:
                self._defined.add(file.name)
                if file.register is not None:
                    file.register(self)
                if file.define is None:
                    self.connection.raw.execute(file.sql)
                else:
                    file.define(self)

    def of_steps(self, steps: str) -> Database:
        if steps == self.steps:
            return self
        key = ("of_steps", steps)
        if key not in self.memory:
            self.memory[key] = Database(self, steps, ray=self.ray, catalogue=self.catalogue)
        other: Database = self.memory[key]
        other.progress = self.progress
        return other

    def reopened(self, source: Source | None = None) -> Database:
        return Database(self if source is None else source, self.steps, catalogue=self.catalogue)

    def leave_out(self, sequences: pa.Table) -> None:
        """Exclude sequences (run, step, seq_id), replacing earlier exclusions. From now on, no sums are stored in the
        traces."""
        self.views.leave_out(sequences)
        self._forget_sums()

    def keep_steps(self, steps: Sequence[int]) -> None:
        """Restrict sequences and scores to the given steps. Logged values still cover all steps."""
        self.views.keep_steps(steps)
        self._forget_sums()

    def supersede(self, pair: Pair, *, runs: bool = False) -> None:
        """Make queries use the pair's computed sums instead of its stored ones: the per-sequence sums or, with `runs`,
        the sums over whole runs."""
        self.sums.supersede(pair, runs=runs)
        self.memory.clear()
        if "lookup" in self._defined:
            self.sums.define_lookup()

    def _forget_sums(self) -> None:
        self.memory.clear()
        if self.sums.forget():
            self._defined.discard("lookup")  # the next query that needs the lookup defines it again, without sums

    def step_condition(self, run: str | None = None) -> str:
        if not self.kept_steps:
            return ""
        return step_condition(self.kept_steps[run or self.sources[0].run])

    def ask(self, query: str) -> Rows:
        """Return a query's rows, bitwise identical on every call."""
        # Use a single thread, so that numbers are added in a fixed order.
        self.connection.execute("SET threads = 1")
        cursor = self.connection.execute(query)
        return Rows(cursor.columns, cursor.fetchall())

    def damage(self, error: Exception) -> TimTraceError | None:
        if self.files.error is not None:
            return self.files.error
        is_of_query = _is_of_function(error) or isinstance(error, duckdb.OutOfMemoryException)
        return None if is_of_query else _unreadable(self.sources, error)

    def _explained(self, error: Exception) -> TimTraceError:
        if self.files.error is None:
            for found in self.function_errors:
                if (of_function := found()) is not None:
                    return of_function
        if (damage := self.damage(error)) is not None:
            return damage
        if _is_of_function(error):
            return DamagedTrace(str(error).strip().splitlines()[-1])
        runs = ", ".join(source.store.url for source in self.sources)
        return QueryFailed(f"{runs}: the query failed ({first_line(error)})")


def cached(read: Callable[Concatenate[Database, Asked], Found]) -> Callable[Concatenate[Database, Asked], Found]:
    """Cache a function's results while the database is open. Callers must not modify them."""

    @wraps(read)
    def known(database: Database, /, *args: Asked.args, **options: Asked.kwargs) -> Found:
        key = (read.__module__, read.__qualname__, args, tuple(sorted(options.items())))
        if key not in database.memory:
            database.memory[key] = read(database, *args, **options)
        found: Found = database.memory[key]
        return found

    return known


def core_files() -> list[MacroFile[Database]]:
    names = ("macros", "pair", "context", "views", "loss")
    grouped = sql_file("group_statistics").format(rows=sql_file("grouped_by_windows"))
    return [
        *(MacroFile[Database](name=name, sql=sql_file(name)) for name in names),
        MacroFile(name="statistics", sql=sql_file("statistics").format(statistics_of_groups=grouped)),
        MacroFile(
            name="sums", sql=sql_file("sums"), functions=(pair_sums.FUNCTION,),
            register=lambda database: pair_sums.register(database.connection.raw),
        ),
        MacroFile(name="lookup", sql=sql_file("lookup"), define=lambda database: database.sums.define_lookup()),
    ]  # fmt: skip


@cache
def core_catalogue() -> Catalogue[Database]:
    return Catalogue(core_files())


def _looked_at(traces: Traces | Source | Sequence[Source] | Database) -> list[Source]:
    if isinstance(traces, Database):
        return traces.sources
    several = [traces] if isinstance(traces, (str, os.PathLike, Source)) else traces
    return [trace for trace in several if isinstance(trace, Source)]


def _is_of_function(error: Exception) -> bool:
    return isinstance(error, duckdb.InvalidInputException) and "Python exception" in str(error)


def _unreadable(sources: Sequence[Source], error: Exception) -> DamagedTrace | None:
    for source in sources:
        for entries in source.files.values():
            for entry in entries:
                try:
                    pq.read_table(pa.PythonFile(FileCursor(entry.file), mode="r"))
                except (pa.ArrowException, OSError, TimTraceError):
                    return source.unreadable(entry, error)
    return None
