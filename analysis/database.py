"""One or several traces as a DuckDB database: views and macros over the files, nothing copied."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from importlib.resources import files
from typing import Any

import duckdb
import pyarrow as pa

from ..schemas.errors import DamagedTrace, InvalidOption
from ..schemas.layout import TABLES
from ..schemas.sums import KINDS, SEQUENCE_SUMS
from ..schemas.tables import TABLES as TABLE_SPECS
from ..schemas.tables import Table
from .correction import define as define_corrections
from .correction import published
from .distributions.function import ComparedDistributions
from .distributions.measures import MEASURES
from .frameworks.verl_sums import register as register_verl_sums
from .pair_sums import register as register_pair_sums
from .routing import register as register_routing
from .rows import Rows
from .source import Pair, Source, open_source

Traces = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

FRAMEWORK_MACROS = {
    "verl": ("verl_rows", "verl", "verl_correction"),
    "trl": ("trl",),
    "slime": ("slime",),
    "nemo-rl": ("nemo_rl",),
    "prime-rl": ("prime_rl",),
    "openrlhf": ("openrlhf",),
}
"""Framework -> the files of its macros, whose names begin with its own. They take a while to define, and few questions
need them."""

_OBJECTIVE = ("objective_", "loss_term", "loss_clips", "clamped_exp", "correction_weight")
"""What a query names that needs the macros of objectives, which take a while to define as well."""

_PASSES = pa.schema([(name, pa.string()) for name in ("run", "pass", "contract", "engine", "device", "contract_json")])

_SQL_TYPES = {pa.string(): "VARCHAR", pa.int64(): "BIGINT"}
"""DuckDB's names of the types that columns have which earlier releases did not write."""


class Database:
    """Traces that are open for questions."""

    def __init__(self, traces: Traces | Source, *, lean: bool = False):
        """Look at the traces and define views and macros. Raises TraceNotFound, NewerTrace or DamagedTrace.

        A Source is a trace that was looked at already, of which parts may have been taken out.

        A `lean` database has the tables alone: for questions that are put to these, and that would wait for macros which
        they do not use. `define` adds those of a file.
        """
        self.given = (traces.store.url,) if isinstance(traces, Source) else tuple(_urls(traces))
        """The traces as they were named, for commands to copy."""
        self.sources = [traces] if isinstance(traces, Source) else _open(traces)
        self.connection = duckdb.connect()
        self._superseded: set[Pair] = set()
        self.is_whole = True
        """Whether the views hold every sequence."""
        self._leaves_out = False
        self._defined: set[str] = set()
        self.memory: dict[Any, Any] = {}
        """What was read of it once: see remembered."""
        _register_filesystems(self.connection, self.sources)
        for table in TABLES:
            _define_table(self.connection, table, TABLE_SPECS[table], self.sources)
        _define_passes(self.connection, self.sources)
        _define_computed(self.connection)
        self.define_sums(set())
        # Pairs for which the tables of sums hold every sequence; the others are computed from tokens.
        self.covered = set.intersection(*(source.covered for source in self.sources))
        self.run_covered = set.intersection(*(source.run_covered for source in self.sources))
        self.distributions = ComparedDistributions(self.sources)
        if not lean:
            self._define_macros()

    def _define_macros(self) -> None:
        register_routing(self.connection, self.sources)
        register_pair_sums(self.connection)
        register_verl_sums(self.connection)
        for name in ("macros", "pair", "context", "bounds", "triangle", "sums", "views", "routing"):
            self.define(name)
        self._define_lookup()
        self.define("statistics")
        define_corrections(self.connection, published(), sql_file("corrections"))
        self.distributions.define(self.connection)
        self.connection.execute(sql_file("distributions").format(measures=", ".join(f"measured.{m}" for m in MEASURES)))

    def leave_out(self, sequences: pa.Table) -> None:
        """Let the views hold all but these sequences, given by run, step and seq_id; nothing computed here is kept then.

        Another call leaves out others instead.
        """
        self.connection.register("left_out", sequences)
        if not self._leaves_out:
            for name in ("sequences", "scores"):
                self.connection.execute(f"ALTER VIEW {name} RENAME TO all_{name}")
                self.connection.execute(
                    f"CREATE VIEW {name} AS SELECT * FROM all_{name} ANTI JOIN left_out USING (run, step, seq_id)"
                )
        self._leaves_out, self.is_whole = True, False
        self.memory.clear()
        for spec in KINDS.values():
            self.connection.execute(f"DELETE FROM computed_{spec.name}")
        self._superseded, self.covered, self.run_covered = set(), set(), set()
        self.define_sums(self._superseded)
        self._define_lookup()

    def keep_steps(self, steps: Sequence[int]) -> None:
        """Let the views hold the sequences and scores of these steps alone, and what was logged at all steps."""
        wanted = ", ".join(str(int(step)) for step in steps)
        # The range lets DuckDB pass over row groups, which it does not for a long list.
        within = f"step BETWEEN {min(steps)} AND {max(steps)} AND step IN ({wanted})" if steps else "false"
        for name in ("sequences", "scores"):
            self.connection.execute(f"ALTER VIEW {name} RENAME TO every_{name}")
            self.connection.execute(f"CREATE VIEW {name} AS SELECT * FROM every_{name} WHERE {within}")
        self.is_whole = False
        self.memory.clear()
        self.covered, self.run_covered = set(), set()

    def ask(self, query: str) -> Rows:
        """A query's rows, with the same last digits every time.

        Raises DamagedTrace and its kin when the trace's Zarr groups do not hold what its scores name.
        """
        # One thread adds in one order.
        self.connection.execute("SET threads = 1")
        try:
            cursor = self.connection.execute(query)
            return Rows(tuple(column[0] for column in cursor.description), cursor.fetchall())
        except duckdb.Error as error:
            if (told := self.distributions.error) is not None:
                raise told from error
            if isinstance(error, duckdb.InvalidInputException):  # what a function of ours raised while DuckDB called it
                raise DamagedTrace(str(error).strip().splitlines()[-1]) from error
            raise

    def define(self, name: str) -> None:
        """Make the macros of one of this package's .sql files known, once."""
        if name not in self._defined:
            self.connection.execute(sql_file(name))
            self._defined.add(name)

    def define_like(self, frameworks: Collection[str]) -> None:
        """Make the macros of frameworks' own numbers known. Raises InvalidOption for one that there is not."""
        for framework in frameworks:
            if framework not in FRAMEWORK_MACROS:
                raise InvalidOption(f"like: got {framework!r}; use {', '.join(FRAMEWORK_MACROS)}")
            for name in FRAMEWORK_MACROS[framework]:
                self.define(name)

    def define_named(self, query: str) -> None:
        """Make the macros known of the frameworks that a query names, and those of objectives."""
        if any(name in query.lower() for name in _OBJECTIVE):
            self.define_objective()
        self.define_like([name for name in FRAMEWORK_MACROS if f"{name.replace('-', '_')}_" in query.lower()])

    def define_objective(self) -> None:
        """Make the macros of objectives known."""
        if "objective" not in self._defined:
            self.connection.execute(sql_file("objective"))
            self._defined.add("objective")

    def supersede(self, pair: Pair, *, run_quantiles: bool) -> None:
        """Say that what was computed here holds every sequence of a pair, and what the trace keeps of it does not."""
        self._superseded.add(pair)
        self.memory.clear()
        self.define_sums(self._superseded)
        self.covered.add(pair)
        if run_quantiles:
            self.run_covered.add(pair)
        self._define_lookup()

    def _define_lookup(self) -> None:
        columns = ", ".join(["run", *(c.name for c in SEQUENCE_SUMS.columns if c.name not in ("pass_a", "pass_b"))])
        self.connection.execute(
            sql_file("lookup").format(
                covered=_pairs(self.covered), run_covered=_pairs(self.run_covered), sum_columns=columns
            )
        )

    def define_sums(self, superseded: set[Pair]) -> None:
        """Define the tables of sums; of `superseded` pairs they hold what was computed here, not what the trace keeps."""
        for spec in KINDS.values():
            columns = ", ".join(column.name for column in spec.columns)
            parts = [
                f"SELECT {quoted(source.run)} AS run, {columns} FROM read_parquet({_list([path])})"
                for source in self.sources
                for pair, path in source.sums.get(spec.name, {}).items()
                if pair not in superseded
            ]
            parts.append(f"SELECT run, {columns} FROM computed_{spec.name}")
            _define_view(self.connection, spec.name, parts, columns, spec.schema)


def opened(traces: Traces | Database) -> Database:
    """Traces as a database; one that is open already stays as it is."""
    return traces if isinstance(traces, Database) else Database(traces)


def connect(traces: Traces, *, like: Collection[str] = ()) -> duckdb.DuckDBPyConnection:
    """Open one trace or several for SQL.

    The connection has the views `sequences`, `scores`, `passes`, `metrics`, `steps` and `tokens` and the table macros
    `pair(a, b)`, `pair_sequences(a, b)`, `pair_steps(a, b)` and `pair_runs(a, b)`, where d = logprob(a) - logprob(b) in
    nats; `pair_distributions(a, b)`, a row a response token whose distribution both passes captured, with
    `pair_distribution_sequences(a, b)`, `_steps` and `_runs` over these; `pair_routing(a, b)` and its kin where router
    choices were recorded; and `objective_tokens(train, rollout, now, ...)` and `objective_steps`, what the mismatch does to a
    loss. Every one has a column `run`. A trace that is being written shows what was recorded by now.

    Raises TraceNotFound, NewerTrace or DamagedTrace.
    """
    database = Database(traces)
    database.define_like(like)
    database.define_objective()
    return database.connection


def sql_file(name: str) -> str:
    """Read one of the .sql files of this package."""
    return (files(__package__) / "sql" / f"{name}.sql").read_text(encoding="utf-8")


def _urls(traces: Traces) -> list[str]:
    return [os.fspath(url) for url in ([traces] if isinstance(traces, (str, os.PathLike)) else traces)]


def _open(traces: Traces) -> list[Source]:
    sources: list[Source] = []
    names: set[str] = set()
    for url in _urls(traces):
        source = open_source(url)
        name, number = source.run, 1
        while source.run in names:
            number += 1
            source.run = f"{name}-{number}"
        for contract in source.passes:
            contract["run"] = source.run
        names.add(source.run)
        sources.append(source)
    return sources


def _register_filesystems(connection: duckdb.DuckDBPyConnection, sources: list[Source]) -> None:
    registered: set[str] = set()
    for source in sources:
        if source.store.is_local:
            continue
        protocol = source.store.filesystem.protocol
        names = {protocol} if isinstance(protocol, str) else set(protocol)
        if not names & registered:
            connection.register_filesystem(source.store.filesystem)
            registered |= names


def _define_table(connection: duckdb.DuckDBPyConnection, name: str, spec: Table, sources: list[Source]) -> None:
    columns = ", ".join(f'"{column.name}"' for column in spec.columns)
    parts = []
    for index, source in enumerate(sources):
        run = quoted(source.run)
        for lacking, paths in source.files_by_columns(name).items():
            found = ", ".join(
                f'NULL::{_SQL_TYPES[column.type]} AS "{column.name}"' if column.name in lacking else f'"{column.name}"'
                for column in spec.columns
            )
            parts.append(f"SELECT {run} AS run, {found} FROM read_parquet({_list(paths)})")
        if name in source.journals:
            journal = f"journal_{index}_{name}"
            connection.register(journal, source.journals[name])
            parts.append(f"SELECT {run} AS run, {columns} FROM {journal}")
    _define_view(connection, name, parts, columns, spec.schema)


def _define_computed(connection: duckdb.DuckDBPyConnection) -> None:
    """Tables for sums that are computed while the database is open."""
    for spec in KINDS.values():
        columns = ", ".join(column.name for column in spec.columns)
        connection.register(f"empty_{spec.name}", spec.schema.empty_table())
        connection.execute(
            f"CREATE TABLE computed_{spec.name} AS SELECT NULL::VARCHAR AS run, {columns} FROM empty_{spec.name}"
        )


def _define_passes(connection: duckdb.DuckDBPyConnection, sources: list[Source]) -> None:
    rows = [contract for source in sources for contract in source.passes]
    connection.register("contracts", pa.Table.from_pylist(rows, _PASSES))
    connection.execute('CREATE VIEW passes AS SELECT * FROM contracts ORDER BY run, "pass", contract')


def _define_view(
    connection: duckdb.DuckDBPyConnection, name: str, parts: list[str], columns: str, schema: pa.Schema
) -> None:
    if not parts:
        connection.register(f"empty_{name}", schema.empty_table())
        parts = [f"SELECT NULL::VARCHAR AS run, {columns} FROM empty_{name}"]
    connection.execute(f"CREATE OR REPLACE VIEW {name} AS {' UNION ALL '.join(parts)}")


def _list(paths: list[str]) -> str:
    return f"[{', '.join(quoted(path) for path in paths)}]"


def _pairs(pairs: set[Pair]) -> str:
    # Of no pair at all the list holds a name that none has: `x IN (NULL)` would be NULL.
    return ", ".join(quoted(f"{a} {b}") for a, b in sorted(pairs)) or "''"


def quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
