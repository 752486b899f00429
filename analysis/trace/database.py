"""One or several traces as a DuckDB database: views and macros over the files, nothing copied."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial, wraps
from threading import Event, Thread
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from ...schemas.errors import DamagedTrace, QueryFailed, TimTraceError, option, tell_damage
from ...schemas.steps import ALL_STEPS
from ...tracer.progress import Progress, no_progress
from ...tracer.store import first_line
from ...tracer.trace_files import TraceFiles
from ...tracer.verified_file import FileCursor
from ..rows import Rows
from . import pair_sums
from .connection import Connection
from .macros import Catalogue, MacroFile, sql_file, statistics_of_groups
from .source import Pair, Source, Traces, open_sources, urls_of
from .sum_tables import SumTables
from .table_views import TableViews, step_condition

Asked = ParamSpec("Asked")
Found = TypeVar("Found")

_LOOK_EVERY_S = 0.1
"""Seconds after which a running query is asked again how far it has come."""


class Database:
    """Traces that are open for queries: a connection, the views of their tables, and their sums."""

    def __init__(
        self, traces: Traces | Source | Sequence[Source] | Database, steps: str = ALL_STEPS, *, ray: str | None = None,
        catalogue: Callable[[], Catalogue[Database]] | None = None,
    ):  # fmt: skip
        """Look at the traces and define their views; macros are defined when a query first names them.

        A Source was looked at already, and files may have been taken out of it; a Database is opened again, with its sources.
        Views hold `steps`, as parse_steps reads it, of each trace, and hyperparameters of earlier steps. `ray` is the cluster
        among which readings of all tokens are divided: see spread. Without a `catalogue` there are only the macros of this
        folder: `views.open_database` adds those of every feature.

        Raises TraceNotFound, NewerTrace, DamagedTrace, and InvalidOption where a trace has none of the steps.
        """
        self.given: tuple[str, ...]
        """The traces as they were named, for commands to copy."""
        self.sources: list[Source]
        self.catalogue: Callable[[], Catalogue[Database]] = catalogue or core_catalogue
        looked_at = _looked_at(traces)
        if isinstance(traces, Database):
            self.given, self.sources = traces.given, traces.sources
            self.catalogue = catalogue or traces.catalogue
        elif looked_at:
            self.given, self.sources = tuple(source.store.url for source in looked_at), looked_at
        else:
            named = cast("Traces", traces)
            self.given, self.sources = tuple(urls_of(named)), open_sources(named)
        self.files = TraceFiles()
        self.connection = Connection(duckdb.connect(), self._explained)
        self.function_errors: list[Callable[[], TimTraceError | None]] = []
        """What functions that a query calls ended with: DuckDB keeps the text alone of what they raise."""
        self._defined: set[str] = set()
        self.steps = steps
        """Steps that the views hold, as they were asked for."""
        self.kept_steps: dict[str, list[int]] = {}
        """Run -> steps that the views hold; empty where they hold all."""
        self.memory: dict[Any, Any] = {}
        """Answers of `cached` functions."""
        self.progress: Progress = no_progress
        """Notified by readings of all tokens of how many they have read: see `telling`."""
        self.ray = ray
        self.connection.register_filesystem(self.files)
        self.connection.execute("SET parquet_metadata_cache = true")  # no file of a trace changes
        if all(source.store.is_local for source in self.sources):  # reading ahead takes a megabyte of each list
            self.connection.execute("SET disable_parquet_prefetching = true")
        self.views = TableViews(self.connection, self.sources, self.files)
        self.sums = SumTables(self.connection, self.views, self.sources)
        self.connection.define_named = self.define_named
        self.connection.choose_files = self.views.choose_files
        if steps != ALL_STEPS:
            self.kept_steps, condition = self.views.choose_steps(steps)
            self.sums.narrow(condition)
        if not looked_at:  # who looked at one knows
            tell_damage(self.damaged)

    @contextmanager
    def telling(self, progress: Progress) -> Iterator[None]:
        """Tell a progress of what is read meanwhile. A reading that is kept, as `cached` does, tells whoever asked first."""
        before, self.progress = self.progress, progress
        try:
            yield
        finally:
            self.progress = before

    @contextmanager
    def following(self, what: str) -> Iterator[None]:
        """Tell the progress how far the query that is run meanwhile has come, in percent, as DuckDB estimates it."""
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
        """What of the traces cannot be read or is missing and is in no answer, a sentence each."""
        return tuple(dict.fromkeys(sentence for source in self.sources for sentence in source.damaged))

    def check_whole(self, *, partial: bool) -> None:
        """Raise DamagedTrace when a part of the traces is in no answer, unless answers from the rest are asked for."""
        if self.damaged and not partial:
            more = f" (and {len(self.damaged) - 1} more: tim-trace verify names them)" if len(self.damaged) > 1 else ""
            raise DamagedTrace(
                f"the trace is damaged or incomplete, so that its rest proves nothing: {self.damaged[0]}{more}; "
                f"{option('partial')} answers from the rest"
            )

    def define_named(self, words: frozenset[str]) -> None:
        """Define the macros and views that a query of these words needs, which were not defined before."""
        for file in self.catalogue().needed(words):
            if file.name not in self._defined:
                self._defined.add(file.name)
                file.define(self)

    def reopened(self, source: Source | None = None) -> Database:
        """Open the same steps of the traces again, or of one of them: what was kept meanwhile is seen."""
        return Database(self if source is None else source, self.steps, catalogue=self.catalogue)

    def leave_out(self, sequences: pa.Table) -> None:
        """Let the views hold all but these sequences, given by run, step and seq_id; nothing computed here is kept then.

        Another call leaves out others instead.
        """
        self.views.leave_out(sequences)
        self.sums.forget()
        self._forget_answers()

    def keep_steps(self, steps: Sequence[int]) -> None:
        """Let the views hold the sequences and scores of these steps alone, and what was logged at all steps."""
        self.views.keep_steps(steps)
        self.sums.distrust()
        self._forget_answers()

    def supersede(self, pair: Pair, *, runs: bool = False) -> None:
        """Answer from what was computed of a pair, for every sequence or every run, not from what the traces keep."""
        self.sums.supersede(pair, runs=runs)
        self._forget_answers()

    def _forget_answers(self) -> None:
        self.memory.clear()
        if "lookup" in self._defined:
            self.sums.define_lookup()

    def step_condition(self, run: str | None = None) -> str:
        """Condition on `step` that holds for the steps of a run that the views hold; empty where they hold all."""
        if not self.kept_steps:
            return ""
        return step_condition(self.kept_steps[run or self.sources[0].run])

    def ask(self, query: str) -> Rows:
        """A query's rows, with the same last digits every time.

        Raises DamagedTrace and its kin when the trace's Zarr groups do not hold what its scores name.
        """
        # One thread adds in one order.
        self.connection.execute("SET threads = 1")
        cursor = self.connection.execute(query)
        return Rows(tuple(column[0] for column in cursor.description), cursor.fetchall())

    def damage(self, error: Exception) -> TimTraceError | None:
        """The damage of the traces that an error of DuckDB comes from; None where none of their files is the cause."""
        if self.files.error is not None:
            return self.files.error
        return None if _is_of_function(error) else _unreadable(self.sources, error)

    def _explained(self, error: Exception) -> TimTraceError:
        """What an error of DuckDB says of the traces, where the query is one of ours."""
        if self.files.error is None:
            for found in self.function_errors:
                if (of_function := found()) is not None:
                    return of_function
        if (damage := self.damage(error)) is not None:
            return damage
        if _is_of_function(error):
            return DamagedTrace(str(error).strip().splitlines()[-1])
        runs = ", ".join(source.store.url for source in self.sources)
        return QueryFailed(f"{runs}: the query could not be answered ({first_line(error)})")


def cached(
    read: Callable[Concatenate[Database, Asked], Found],
) -> Callable[Concatenate[Database, Asked], Found]:
    """Let a function of a database run once for each set of arguments, which must be hashable, while the database is open.

    Everybody who asks gets the same value: none may change it.
    """

    @wraps(read)
    def known(database: Database, /, *args: Asked.args, **options: Asked.kwargs) -> Found:
        key = (read.__module__, read.__qualname__, args, tuple(sorted(options.items())))
        if key not in database.memory:
            database.memory[key] = read(database, *args, **options)
        found: Found = database.memory[key]
        return found

    return known


def macro_file(
    name: str, sql: str, register: Callable[[Database], object] | None = None, *, functions: tuple[str, ...] = (),
    is_listed: bool = True,
) -> MacroFile[Database]:  # fmt: skip
    """A file of SQL, which is run after `register` has given the connection the `functions` and tables that it needs."""
    define = partial(_define, sql, register)
    return MacroFile(name=name, sql=sql, define=define, functions=functions, is_listed=is_listed)


def _define(sql: str, register: Callable[[Database], object] | None, database: Database) -> None:
    if register is not None:
        register(database)
    database.connection.raw.execute(sql)


def core_files() -> list[MacroFile[Database]]:
    """The macros over tables and sums, without which no feature does."""
    names = ("macros", "pair", "context", "bounds", "triangle", "views", "loss", "objective")
    grouped = statistics_of_groups(sql_file("grouped_by_windows"))
    return [
        *(macro_file(name, sql_file(name)) for name in names),
        macro_file("statistics", sql_file("statistics").format(statistics_of_groups=grouped)),
        macro_file("sums", sql_file("sums"), _register_sums, functions=(pair_sums.FUNCTION,)),
        MacroFile(name="lookup", sql=sql_file("lookup"), define=lambda database: database.sums.define_lookup()),
    ]


@cache
def core_catalogue() -> Catalogue[Database]:
    """The catalogue of a database that was opened without any feature."""
    return Catalogue(core_files())


def _register_sums(database: Database) -> None:
    pair_sums.register(database.connection.raw)


def _looked_at(traces: Traces | Source | Sequence[Source] | Database) -> list[Source]:
    """The sources among what is to be opened."""
    if isinstance(traces, Database):
        return traces.sources
    several = [traces] if isinstance(traces, (str, os.PathLike, Source)) else traces
    return [trace for trace in several if isinstance(trace, Source)]


def _is_of_function(error: Exception) -> bool:
    """Whether a function of ours that DuckDB called raised it: for rows that it was given, not for a file."""
    return isinstance(error, duckdb.InvalidInputException) and "Python exception" in str(error)


def _unreadable(sources: Sequence[Source], error: Exception) -> DamagedTrace | None:
    """An error that names the first file that cannot be read, of those that have no checksums to tell."""
    for source in sources:
        for entries in source.snapshot.files.values():
            for entry in entries:
                try:
                    pq.read_table(pa.PythonFile(FileCursor(entry.file), mode="r"))
                except (pa.ArrowException, OSError, TimTraceError):
                    return source.unreadable(entry, error)
    return None
