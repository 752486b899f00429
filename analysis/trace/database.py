"""One or several traces as a DuckDB database: views and macros over the files, nothing copied."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from importlib.resources import files
from threading import Event, Thread
from typing import Any, cast

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from ...schemas.errors import DamagedTrace, InvalidOption, QueryFailed, TimTraceError, option, tell_damage
from ...schemas.layout import HYPERPARAMETER, METRICS, TABLES
from ...schemas.steps import ALL_STEPS, named_range, parse_steps, select_steps
from ...schemas.sums import KINDS, OF_RUNS, SEQUENCE_SUMS, STATISTICS
from ...schemas.tables import TABLES as TABLE_SPECS
from ...schemas.tables import Table
from ...tracer.arrow_arrays import text_array
from ...tracer.located.result_files import result_ids
from ...tracer.progress import Progress, no_progress
from ...tracer.snapshot import TableFile
from ...tracer.store import first_line
from ...tracer.trace_files import TraceFiles
from ...tracer.verified_file import FileCursor, VerifiedFile
from ..correction import Correction, published
from ..correction import define as define_corrections
from ..correction_zones import FUNCTION as CORRECTION_ZONES
from ..distributions.function import COMPARE, MEASURES, ComparedDistributions
from ..frameworks import registry
from ..routing import FUNCTIONS
from ..routing import register as register_routing
from ..rows import Rows
from . import large_tables
from .computed import IN_FILES, RUN_OF_FOLDER, ComputedFiles, run_folder
from .connection import Connection, Parameters
from .large_tables import LargeTables
from .macros import MacroFile, Macros
from .pair_sums import FUNCTION
from .pair_sums import register as register_pair_sums
from .quoting import quoted
from .source import Pair, Source, open_source

Traces = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

RunFile = tuple[str, str]
"""A run, and the URL of a file of it."""

_CHANGES = "CREATE OR REPLACE VIEW changes AS SELECT * FROM recorded_changes"
_LOCATED = """
    CREATE OR REPLACE VIEW operators AS SELECT * FROM located_operators;
    CREATE OR REPLACE VIEW patches AS SELECT * FROM located_patches;
"""

_PASSES = pa.schema([(name, pa.string()) for name in ("run", "pass", "contract", "engine", "device", "contract_json")])

_IS_SETTING = f"starts_with(name, '{HYPERPARAMETER}')"

_RECORDED = f"""
    SELECT DISTINCT run, step
    FROM (SELECT run, step FROM sequences UNION ALL SELECT run, step FROM metrics WHERE NOT {_IS_SETTING}){{where}}
    ORDER BY run, step
"""

_PASSES_OF_SCORES = """
    CREATE OR REPLACE VIEW passes AS SELECT * FROM contracts
    WHERE (run, "pass", contract) IN (SELECT run, "pass", contract FROM scores WHERE contract IS NOT NULL)
       OR (run, "pass") NOT IN (SELECT run, "pass" FROM every_scores)
    ORDER BY run, "pass", contract
"""

_LOOK_EVERY_S = 0.1
"""Seconds after which a running query is asked again how far it has come."""


class Database:
    """Traces that are open for questions."""

    def __init__(
        self, traces: Traces | Source | Sequence[Source] | Database, steps: str = ALL_STEPS, *, ray: str | None = None
    ):
        """Look at the traces and define views; macros are defined when a question first names them.

        A Source is a trace that was looked at already, of which parts may have been taken out, alone or among others; of a Database the traces are
        taken as they were looked at then. `steps`, as parse_steps reads it, is chosen of each trace: nothing of another step
        is in any view then, but for hyperparameters, which hold from the step that they were recorded at. `ray` is the cluster
        that readings of all tokens are divided among, where they can be: see spread.

        Raises TraceNotFound, NewerTrace, DamagedTrace, and InvalidOption where a trace has none of the steps.
        """
        self.given: tuple[str, ...]
        """The traces as they were named, for commands to copy."""
        self.sources: list[Source]
        looked_at = _looked_at(traces)
        if isinstance(traces, Database):
            self.given, self.sources = traces.given, traces.sources
        elif looked_at:
            self.given, self.sources = tuple(source.store.url for source in looked_at), looked_at
        else:
            named = cast("Traces", traces)
            self.given, self.sources = tuple(_urls(named)), _open(named)
        self.files = TraceFiles()
        self.distributions = ComparedDistributions(self.sources)
        self.connection = Connection(
            duckdb.connect(), partial(_explained, self.sources, self.files, self.distributions)
        )
        self.large = LargeTables(self.connection.raw, self.files)
        self.computed = ComputedFiles()
        self._superseded: set[Pair] = set()
        self._superseded_runs: set[Pair] = set()
        self._within = ""
        self.is_whole = True
        """Whether the views hold every sequence."""
        self._leaves_out = False
        self.steps = steps
        """Which steps the views hold, as they were asked for."""
        self.kept_steps: dict[str, list[int]] = {}
        """Run -> steps that the views hold; empty where they hold all."""
        self.macros = Macros(self._macro_files())
        self.memory: dict[Any, Any] = {}
        """What was read of it once: see cached."""
        self.progress: Progress = no_progress
        """Told by readings of all tokens how many they have read: see `telling`."""
        self.ray = ray
        self.connection.register_filesystem(self.files)
        self.connection.execute("SET parquet_metadata_cache = true")  # no file of a trace changes
        if all(source.store.is_local for source in self.sources):  # reading ahead takes a megabyte of each list
            self.connection.execute("SET disable_parquet_prefetching = true")
        for table in TABLES:
            self._define_table(TABLE_SPECS[table])
        _define_passes(self.connection, self.sources)
        self._sums = self._named_sums()
        _define_computed(self.connection)
        self.define_sums(set())
        # Pairs for which the tables of sums hold every sequence; the others are computed from tokens.
        self.covered = set.intersection(*(source.covered for source in self.sources))
        self.run_covered = set.intersection(*(source.run_covered for source in self.sources))
        self.connection.define_named = self.macros.define_named
        self.connection.choose_files = self._choose_files
        if steps != ALL_STEPS:
            self._choose_steps(steps)
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

    def _macro_files(self) -> dict[str, MacroFile]:
        """The files of macros by name; of frameworks by the framework's."""
        run = self.connection.raw.execute
        found = {}
        for name in ("macros", "pair", "context", "bounds", "triangle", "views", "loss", "objective"):
            found[name] = MacroFile(sql := sql_file(name), partial(run, sql))
        grouped = statistics_of_groups(sql_file("grouped_by_windows"))
        sql = sql_file("statistics").format(statistics_of_groups=grouped)
        found["statistics"] = MacroFile(sql, partial(run, sql))
        found["sums"] = MacroFile(sql_file("sums"), self._define_pair_sums, (FUNCTION,))
        found["lookup"] = MacroFile(sql_file("lookup"), self._define_lookup)
        found["routing"] = MacroFile(sql_file("routing"), self._define_routing, FUNCTIONS)
        found["distributions"] = MacroFile(sql_file("distributions"), self._define_distributions, (COMPARE,))
        found["corrections"] = MacroFile(
            sql_file("corrections"),
            lambda: self.define_corrections(published()),
            ("correction_rules", CORRECTION_ZONES),
        )
        found["changes"] = MacroFile(_CHANGES, self._define_changes)
        found["located"] = MacroFile(_LOCATED, self._define_located)
        for name in registry.FRAMEWORKS:
            define = partial(registry.define_macros, name, self.connection)
            found[name] = MacroFile(registry.macros(name), define, is_listed=False)
        return found

    def _define_changes(self) -> None:
        from ..facts.recorded import changes_table

        self.connection.register("recorded_changes", changes_table(self.sources, steps=self.steps))
        self.connection.raw.execute(_CHANGES)

    @property
    def has_located(self) -> bool:
        """Whether results of `locate` lie in a trace."""
        return any(result_ids(source.store) for source in self.sources)

    def _define_located(self) -> None:
        from ..located import view_rows

        for name, rows in view_rows(self).items():
            self.connection.register(f"located_{name}", rows)
        self.connection.raw.execute(_LOCATED)

    def _define_pair_sums(self) -> None:
        register_pair_sums(self.connection.raw)
        self.connection.raw.execute(sql_file("sums"))

    def _define_routing(self) -> None:
        register_routing(self.connection.raw, self.sources)
        self.connection.raw.execute(sql_file("routing"))

    def _define_distributions(self) -> None:
        self.distributions.define(self.connection.raw)
        measures = ", ".join(f"measured.{measure}" for measure in MEASURES)
        self.connection.raw.execute(sql_file("distributions").format(measures=measures))

    def define_corrections(self, corrections: Iterable[Correction], zones: str | None = None) -> None:
        """Let the macros of corrections be over these rules, and the zones that a query gives, where tokens were read before."""
        sql = sql_file("corrections")
        self.macros.redefine("corrections", partial(define_corrections, self.connection.raw, corrections, sql, zones))

    def _define_table(self, spec: Table) -> None:
        """Define the view of a table over the files and journals of every trace."""
        columns = ", ".join(f'"{column.name}"' for column in spec.columns)
        files: dict[tuple[str, ...], list[RunFile]] = {}
        others = []
        for index, source in enumerate(self.sources):
            for lacking, entries in source.files_by_columns(spec.name).items():
                named = [self._add_file(source, entry.relative, entry.file) for entry in entries]
                if len(entries) > large_tables.MANY_FILES:
                    view = self._add_large(index, source, spec, entries, self._found(spec, lacking))
                    others.append(f"SELECT {quoted(source.run)} AS run, {columns} FROM {view}")
                else:
                    files.setdefault(lacking, []).extend(named)
            if spec.name in source.journals:
                journal = f"journal_{index}_{spec.name}"
                self.connection.register(journal, source.journals[spec.name])
                others.append(f"SELECT {quoted(source.run)} AS run, {columns} FROM {journal}")
        parts = [_rows_of(named, self._found(spec, lacking)) for lacking, named in files.items()] + others
        _define_view(self.connection, f"all_{spec.name}", parts, columns, spec.schema)
        _define_view(self.connection, spec.name, self._newest(parts), columns, spec.schema)

    def _found(self, spec: Table, lacking: Collection[str]) -> str:
        """A table's columns as they are read of files that lack some."""
        # DuckDB itself says what it calls the types of Arrow's columns.
        types = self.connection.raw.from_arrow(_no_rows(spec.schema)).types if lacking else spec.columns
        return ", ".join(
            f'NULL::{type} AS "{column.name}"' if column.name in lacking else f'"{column.name}"'
            for column, type in zip(spec.columns, types, strict=True)
        )

    def _add_file(self, source: Source, relative: str, file: VerifiedFile) -> RunFile:
        return source.run, self.files.add(f"{run_folder(source.run)}/{relative}", file)

    def _add_large(self, index: int, source: Source, spec: Table, entries: Sequence[TableFile], columns: str) -> str:
        """Name of a view over files of which a question reads those that it needs."""
        lacking = entries[0].lacking
        view = "_".join(("files", str(index), spec.name, *(("without", *lacking) if lacking else ())))
        schema = pa.schema([field for field in spec.schema if field.name not in lacking])
        self.large.add(view, schema, columns, run_folder(source.run), entries)
        return view

    def _choose_files(self, query: str, parameters: Parameters) -> Callable[[], None]:
        choice = self.large.choose(query, parameters)
        return lambda: None if choice is None else self.large.take(choice)

    def _newest(self, parts: list[str]) -> list[str]:
        """The rows of a step's newest attempt at training alone, where a run resumed."""
        if not parts or not any(source.newest for source in self.sources):
            return parts
        rows = [(source.run, *newest) for source in self.sources for newest in source.newest.items()]
        runs, steps, attempts = zip(*rows, strict=True)
        columns = {"run": text_array(runs), "step": pa.array(steps, pa.int64())}
        self.connection.register("newest", pa.table(columns | {"newest_attempt": pa.array(attempts, pa.int32())}))
        return [
            f"SELECT * EXCLUDE (newest_attempt) FROM ({' UNION ALL '.join(parts)}) LEFT JOIN newest USING (run, step) "
            "WHERE attempt IS NULL OR newest_attempt IS NULL OR attempt = newest_attempt"
        ]

    def _named_sums(self) -> list[tuple[str, Pair, RunFile]]:
        """Kind, pair, run and URL of every file of sums that serves."""
        return [
            (kind, pair, self._add_file(source, file.relative, file))
            for source in self.sources
            for kind, pairs in source.sums.items()
            for pair, file in pairs.items()
        ]

    def leave_out(self, sequences: pa.Table) -> None:
        """Let the views hold all but these sequences, given by run, step and seq_id; nothing computed here is kept then.

        Another call leaves out others instead.
        """
        self.connection.register("left_out", sequences)
        if not self._leaves_out:
            for name in ("sequences", "scores"):
                self.connection.execute(f"ALTER VIEW {name} RENAME TO whole_{name}")
                self.connection.execute(
                    f"CREATE VIEW {name} AS SELECT * FROM whole_{name} ANTI JOIN left_out USING (run, step, seq_id)"
                )
        self._leaves_out, self.is_whole = True, False
        self.memory.clear()
        self._forget("true")
        self.computed.forget()
        self._superseded, self._superseded_runs, self.covered, self.run_covered = set(), set(), set(), set()
        self.define_sums(self._superseded)
        self._redefine_lookup()

    def keep_steps(self, steps: Sequence[int]) -> None:
        """Let the views hold the sequences and scores of these steps alone, and what was logged at all steps."""
        within = step_condition(steps)
        for name in ("sequences", "scores"):
            self._narrow(name, within)
        self.is_whole = False
        self.memory.clear()
        self.covered, self.run_covered = set(), set()

    def _choose_steps(self, steps: str) -> None:
        """Let the views hold these steps alone: of sequences, scores, logged values, sums and contracts."""
        several = len(self.sources) > 1
        recorded = self._recorded_steps(steps)
        self.kept_steps = {run: parse_steps(steps, every, of=run if several else "") for run, every in recorded.items()}
        within, until = [], []
        for run, kept in self.kept_steps.items():
            within.append(f"(run = {quoted(run)} AND {step_condition(kept, recorded[run])})")
            until.append(f"(run = {quoted(run)} AND {_IS_SETTING} AND step <= {kept[-1]})")
        self._within = " OR ".join(within)
        for table in TABLES:
            kept_rows = " OR ".join([self._within, *until]) if table == METRICS else self._within
            for name in (table, f"all_{table}"):
                self._narrow(name, kept_rows)
        self.connection.execute(_PASSES_OF_SCORES)
        self.is_whole, self.run_covered = False, set()
        self.define_sums(self._superseded)

    def _recorded_steps(self, steps: str) -> dict[str, list[int]]:
        """Run -> its steps: those of the range that a text names, where it names one, or else all that are recorded."""
        within = named_range(steps)
        if within is not None:
            first, last = within
            until = "" if last is None else f" AND step <= {last}"
            found = self._steps_where(f" WHERE step >= {first}{until}")
            if all(select_steps(steps, every) for every in found.values()):
                return found
        return self._steps_where("")

    def _steps_where(self, where: str) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {source.run: [] for source in self.sources}
        for run, step in self.connection.execute(_RECORDED.format(where=where)).fetchall():
            found[run].append(step)
        return found

    def _narrow(self, view: str, within: str) -> None:
        self.connection.execute(f"ALTER VIEW {view} RENAME TO every_{view}")
        self.connection.execute(f"CREATE VIEW {view} AS SELECT * FROM every_{view} WHERE {within}")

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
        """The damage of the traces that DuckDB ended with; None where no file of theirs is the cause."""
        return _damage(self.sources, self.files, error)

    def begin_sums(self, pair: Pair) -> None:
        """Forget what was computed here of a pair: the views hold what the trace keeps."""
        self._forget(f"pass_a = {quoted(pair[0])} AND pass_b = {quoted(pair[1])}")
        self.computed.forget(pair)
        self._superseded.discard(pair)
        self._superseded_runs.discard(pair)
        self.define_sums(self._superseded)

    def kept_sums(self, spec: Table, pair: Pair, runs: Collection[str]) -> str:
        """A query for what the traces of some runs keep of a pair, whether the views hold it or not."""
        files = [file for *known, file in self._sums if known == [spec.name, pair] and file[0] in runs]
        return _rows_of(files, _names(spec))

    def is_computed(self, pair: Pair, *, of_runs: bool = False) -> bool:
        """Whether the views hold the sums of a pair that were computed here, or those of its runs, not what the trace keeps."""
        return pair in (self._superseded_runs if of_runs else self._superseded)

    def supersede(self, pair: Pair) -> None:
        """Say that what was computed here holds every sequence of a pair, and what the trace keeps of it does not."""
        self._superseded.add(pair)
        self.covered.add(pair)
        self._redefine_sums()

    def supersede_runs(self, pair: Pair, *, covered: bool) -> None:
        """Say that the quantiles of runs are those that were computed here, and whether these are of all runs."""
        self._superseded_runs.add(pair)
        if covered:
            self.run_covered.add(pair)
        self._redefine_sums()

    def _redefine_sums(self) -> None:
        self.memory.clear()
        self.define_sums(self._superseded)
        self._redefine_lookup()

    def _forget(self, where: str) -> None:
        for spec in KINDS.values():
            if spec not in IN_FILES:
                self.connection.execute(f"DELETE FROM computed_{spec.name} WHERE {where}")

    def _redefine_lookup(self) -> None:
        """Follow what is covered now, where somebody has looked it up before."""
        if self.macros.known("lookup"):
            self._define_lookup()

    def _define_lookup(self) -> None:
        columns = ", ".join(["run", *(c.name for c in SEQUENCE_SUMS.columns if c.name not in ("pass_a", "pass_b"))])
        self.connection.execute(
            sql_file("lookup").format(
                covered=_pairs(self.covered),
                run_covered=_pairs(self.run_covered),
                sum_columns=columns,
                statistics=", ".join(STATISTICS),
            )
        )

    def define_sums(self, superseded: set[Pair]) -> None:
        """Define the tables of sums; of `superseded` pairs they hold what was computed here, not what the trace keeps."""
        for spec in KINDS.values():
            passed_over = self._superseded_runs if spec in OF_RUNS else set()
            columns = _names(spec)
            files = [
                file for kind, pair, file in self._sums if kind == spec.name and pair not in superseded | passed_over
            ]
            if self._within and spec in OF_RUNS:  # what is kept of a whole run is of all its steps
                files = []
            parts = [_rows_of(files, columns)] if files else []
            if self._within:
                parts = [f"SELECT * FROM ({part}) WHERE {self._within}" for part in parts]
            if spec in IN_FILES:
                computed = [(file.run, str(file.path)) for file in self.computed.of(spec.name)]
                parts += [_rows_of(computed, columns)] if computed else []
            else:
                parts.append(f"SELECT run, {columns} FROM computed_{spec.name}")
            _define_view(self.connection, spec.name, parts, columns, spec.schema)


def opened(traces: Traces | Database, steps: str = ALL_STEPS, ray: str | None = None) -> Database:
    """Traces as a database of some steps; one that is open already stays as it is, or is opened again for these steps or a cluster.

    Raises InvalidOption where a trace has none of the steps, TraceNotFound, NewerTrace or DamagedTrace.
    """
    if isinstance(traces, Database) and steps in (ALL_STEPS, traces.steps) and ray in (None, traces.ray):
        return traces
    return Database(traces, steps, ray=ray)


def connect(traces: Traces, *, like: Collection[str] = ()) -> duckdb.DuckDBPyConnection:
    """Open one trace or several for SQL.

    The connection has the views `sequences`, `scores`, `passes`, `metrics`, `steps`, `tokens` and `changes`, the views
    `operators` and `patches` of what `locate` found, and the table macros
    `pair(a, b)`, `pair_sequences(a, b)`, `pair_steps(a, b)` and `pair_runs(a, b)`, where d = logprob(a) - logprob(b) in
    nats; `pair_distributions(a, b)`, a row a response token whose distribution both passes captured, with
    `pair_distribution_sequences(a, b)`, `_steps` and `_runs` over these; `pair_routing(a, b)` and its kin where router
    choices were recorded; and `objective_tokens(train, rollout, now, ...)`, `objective_steps` and `loss_shares(now, ...)`, what
    the mismatch does to a loss. Every one has a column `run`. A trace that is being written shows what was recorded by now.

    Raises TraceNotFound, NewerTrace or DamagedTrace.
    """
    for name in like:
        registry.check_name(name)
    database = Database(traces)
    database.macros.define_all()
    for name in like:
        database.macros.define(name)
    database.large.choose_all()
    return database.connection.raw


@cache
def sql_file(name: str) -> str:
    """Read one of the .sql files of this package."""
    return (files("tim_trace.analysis.sql") / f"{name}.sql").read_text(encoding="utf-8")


def statistics_of_groups(rows: str) -> str:
    """SQL of the statistics of groups of sequences, from a query of rows as group_statistics.sql says."""
    return sql_file("group_statistics").format(rows=rows)


def _looked_at(traces: Traces | Source | Sequence[Source] | Database) -> list[Source]:
    """The sources among what is to be opened."""
    if isinstance(traces, Database):
        return traces.sources
    several = [traces] if isinstance(traces, (str, os.PathLike, Source)) else traces
    return [trace for trace in several if isinstance(trace, Source)]


def _urls(traces: Traces) -> list[str]:
    urls = [os.fspath(url) for url in ([traces] if isinstance(traces, (str, os.PathLike)) else traces)]
    if not urls:
        raise InvalidOption("got none; name one folder or several", option="traces")
    return urls


def _open(traces: Traces) -> list[Source]:
    sources: list[Source] = []
    names: set[str] = set()
    for url in _urls(traces):
        source = open_source(url)
        name, number = source.run, 1
        while source.run in names:
            number += 1
            source.run = f"{name}-{number}"
        names.add(source.run)
        sources.append(source)
    return sources


def _explained(
    sources: Sequence[Source], files: TraceFiles, distributions: ComparedDistributions, error: Exception
) -> TimTraceError:
    """What an error of DuckDB's says of the traces, where the question is one of ours."""
    if files.error is None and distributions.error is not None:
        return distributions.error
    if (damage := _damage(sources, files, error)) is not None:
        return damage
    if _is_of_function(error):
        return DamagedTrace(str(error).strip().splitlines()[-1])
    runs = ", ".join(source.store.url for source in sources)
    return QueryFailed(f"{runs}: the question could not be answered ({first_line(error)})")


def _damage(sources: Sequence[Source], files: TraceFiles, error: Exception) -> TimTraceError | None:
    """The damaged file that an error of DuckDB's is of; None where none is the cause."""
    if files.error is not None:
        return files.error
    return None if _is_of_function(error) else _unreadable(sources, error)


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


def _define_computed(connection: Connection) -> None:
    """Tables for sums that are computed while the database is open."""
    for spec in KINDS.values():
        if spec in IN_FILES:
            continue
        columns = _names(spec)
        connection.register(f"empty_{spec.name}", _no_rows(spec.schema))
        connection.execute(
            f"CREATE TABLE computed_{spec.name} AS SELECT NULL::VARCHAR AS run, {columns} FROM empty_{spec.name}"
        )


def _define_passes(connection: Connection, sources: list[Source]) -> None:
    rows = [contract for source in sources for contract in source.passes]
    columns = [text_array([row[name] for row in rows]) for name in _PASSES.names]
    connection.register("contracts", pa.Table.from_arrays(columns, schema=_PASSES))
    connection.execute('CREATE VIEW passes AS SELECT * FROM contracts ORDER BY run, "pass", contract')


def _no_rows(schema: pa.Schema) -> pa.Table:
    """A table without rows; `empty_table` imports pandas, which takes a third of a second."""
    return pa.Table.from_batches([], schema)


def _define_view(connection: Connection, name: str, parts: list[str], columns: str, schema: pa.Schema) -> None:
    if not parts:
        connection.register(f"empty_{name}", _no_rows(schema))
        parts = [f"SELECT NULL::VARCHAR AS run, {columns} FROM empty_{name}"]
    connection.execute(f"CREATE OR REPLACE VIEW {name} AS {' UNION ALL '.join(parts)}")


def step_condition(steps: Sequence[int], recorded: Sequence[int] | None = None) -> str:
    """Condition on `step` that holds for these alone, of `recorded` ones where these are known.

    >>> step_condition([3, 4, 6], [1, 3, 4, 6])
    'step BETWEEN 3 AND 6'
    >>> step_condition([3, 6])
    'step BETWEEN 3 AND 6 AND step IN (3, 6)'
    """
    if isinstance(steps, range):  # as long as it may be where steps are timestamps: none of it is gone through
        return f"step BETWEEN {steps.start} AND {steps.stop - 1}" if steps else "false"
    if not len(steps):
        return "false"
    first, last = min(steps), max(steps)
    # The range lets DuckDB pass over row groups, which it does not for a long list.
    within = f"step BETWEEN {first} AND {last}"
    num_known = last + 1 - first if recorded is None else sum(first <= step <= last for step in recorded)
    return within if num_known == len(set(steps)) else f"{within} AND step IN ({', '.join(map(str, steps))})"


def _rows_of(files: Sequence[RunFile], columns: str) -> str:
    """A query for columns of files, and the run of each: several runs' are one reading, which has one plan."""
    urls, runs = f"[{', '.join(quoted(url) for _, url in files)}]", {run for run, _ in files}
    if len(runs) == 1:
        return f"SELECT {quoted(*runs)} AS run, {columns} FROM read_parquet({urls})"
    # DuckDB reads the name of the run from that of its folder, and opens no file of a run that a question leaves out.
    parsed = f"hive_partitioning = true, hive_types = {{'{RUN_OF_FOLDER}': VARCHAR}}"
    return f"SELECT substr({RUN_OF_FOLDER}, 2) AS run, {columns} FROM read_parquet({urls}, {parsed})"


def _names(spec: Table) -> str:
    return ", ".join(column.name for column in spec.columns)


def _pairs(pairs: set[Pair]) -> str:
    # Of no pair at all the list holds a name that none has: `x IN (NULL)` would be NULL.
    return ", ".join(quoted(f"{a} {b}") for a, b in sorted(pairs)) or "''"
