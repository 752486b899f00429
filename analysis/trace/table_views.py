from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence

import pyarrow as pa

from ...schemas.layout import HYPERPARAMETER, METRICS, TABLES
from ...schemas.steps import named_range, parse_steps, select_steps
from ...schemas.tables import TABLES as TABLE_SPECS
from ...schemas.tables import Table
from ...tracer.arrow_arrays import text_array
from ...tracer.parquet_file import TraceFiles
from ...tracer.snapshot import TableFile
from ...tracer.verified_file import VerifiedFile
from . import large_tables
from .connection import Connection, Parameters
from .large_tables import LargeTables
from .macros import quoted
from .source import RUN_OF_FOLDER, Source, run_folder

RunFile = tuple[str, str]

_PASSES = ("run", "pass", "contract", "engine", "device", "contract_json")

_SEQUENCE = pa.schema([("run", pa.string()), ("step", pa.int64()), ("seq_id", pa.string())])

_IS_SETTING = f"starts_with(name, '{HYPERPARAMETER}')"


class TableViews:
    def __init__(self, connection: Connection, sources: Sequence[Source], files: TraceFiles):
        self._connection, self._sources, self._files = connection, sources, files
        self.large: LargeTables | None = None
        self.is_whole = True
        self._leaves_out = False
        connection.register("left_out", no_rows(_SEQUENCE))
        for table in TABLES:
            self._define(TABLE_SPECS[table])
        rows = [contract for source in sources for contract in source.passes]
        columns = ", ".join(f'unnest(${name}::VARCHAR[]) AS "{name}"' for name in _PASSES)
        texts = {name: [row[name] for row in rows] for name in _PASSES}
        connection.execute(f"CREATE TABLE contracts AS SELECT {columns}", texts)
        connection.execute('CREATE VIEW passes AS SELECT * FROM contracts ORDER BY run, "pass", contract')

    def add_file(self, source: Source, relative: str, file: VerifiedFile) -> RunFile:
        return source.run, self._files.add(f"{run_folder(source.run)}/{relative}", file)

    def choose_files(self, query: str, parameters: Parameters) -> Callable[[], None]:
        large = self.large
        choice = None if large is None else large.choose(query, parameters)
        return lambda: None if large is None or choice is None else large.take(choice)

    def choose_steps(self, steps: str) -> tuple[dict[str, list[int]], str]:
        """Limit all tables to the selected steps, but keep earlier hyperparameters, because they stay in effect. Return
        each run's selected steps, and an SQL condition that selects them."""
        several = len(self._sources) > 1
        recorded = self._recorded_steps(steps)
        kept_steps = {run: parse_steps(steps, every, of=run if several else "") for run, every in recorded.items()}
        conditions, until = [], []
        for run, kept in kept_steps.items():
            conditions.append(f"(run = {quoted(run)} AND {step_condition(kept, recorded[run])})")
            until.append(f"(run = {quoted(run)} AND {_IS_SETTING} AND step <= {kept[-1]})")
        condition = " OR ".join(conditions)
        for table in TABLES:
            kept_rows = " OR ".join([condition, *until]) if table == METRICS else condition
            for name in (table, f"all_{table}"):
                self._wrap(name, f"every_{name}", f"WHERE {kept_rows}")
        self._connection.execute("""
            CREATE OR REPLACE VIEW passes AS SELECT * FROM contracts
            WHERE (run, "pass", contract) IN (SELECT run, "pass", contract FROM scores WHERE contract IS NOT NULL)
               OR (run, "pass") NOT IN (SELECT run, "pass" FROM every_scores)
            ORDER BY run, "pass", contract
        """)
        self.is_whole = False
        return kept_steps, condition

    def keep_steps(self, steps: Sequence[int]) -> None:
        for name in ("sequences", "scores"):
            self._wrap(name, f"every_{name}", f"WHERE {step_condition(steps)}")
        self.is_whole = False

    def leave_out(self, sequences: pa.Table) -> None:
        self._connection.register("left_out", sequences)
        if not self._leaves_out:
            for name in ("sequences", "scores"):
                self._wrap(name, f"whole_{name}", "ANTI JOIN left_out USING (run, step, seq_id)")
        self._leaves_out, self.is_whole = True, False

    def _define(self, spec: Table) -> None:
        columns = ", ".join(f'"{column.name}"' for column in spec.columns)
        files: dict[tuple[str, ...], list[RunFile]] = {}
        others = []
        for index, source in enumerate(self._sources):
            by_lacking = defaultdict(list)
            for entry in source.files[spec.name]:
                by_lacking[entry.lacking].append(entry)
            for lacking, entries in by_lacking.items():
                named = [self.add_file(source, entry.relative, entry.file) for entry in entries]
                if len(entries) > large_tables.MANY_FILES:
                    view = self._add_large(index, source, spec, entries, self._found(spec, lacking))
                    others.append(f"SELECT {quoted(source.run)} AS run, {columns} FROM {view}")
                else:
                    files.setdefault(lacking, []).extend(named)
            if spec.name in source.journals:
                journal = f"journal_{index}_{spec.name}"
                self._connection.register(journal, source.journals[spec.name])
                others.append(f"SELECT {quoted(source.run)} AS run, {columns} FROM {journal}")
        parts = [rows_of(named, self._found(spec, lacking)) for lacking, named in files.items()] + others
        define_view(self._connection, f"all_{spec.name}", parts, columns, spec.schema)
        define_view(self._connection, spec.name, self._newest(parts), columns, spec.schema)

    def _found(self, spec: Table, lacking: Collection[str]) -> str:
        # A missing column becomes NULL with the DuckDB type that corresponds to its Arrow type.
        types = self._connection.raw.from_arrow(no_rows(spec.schema)).types if lacking else spec.columns
        return ", ".join(
            f'NULL::{type} AS "{column.name}"' if column.name in lacking else f'"{column.name}"'
            for column, type in zip(spec.columns, types, strict=True)
        )

    def _add_large(self, index: int, source: Source, spec: Table, entries: Sequence[TableFile], columns: str) -> str:
        lacking = entries[0].lacking
        view = "_".join(("files", str(index), spec.name, *(("without", *lacking) if lacking else ())))
        schema = pa.schema([field for field in spec.schema if field.name not in lacking])
        self.large = self.large or LargeTables(self._connection.raw, self._files)
        self.large.add(view, schema, columns, run_folder(source.run), entries)
        return view

    def _newest(self, parts: list[str]) -> list[str]:
        if not parts or not any(source.newest for source in self._sources):
            return parts
        rows = [(source.run, *newest) for source in self._sources for newest in source.newest.items()]
        runs, steps, attempts = zip(*rows, strict=True)
        columns = {"run": text_array(runs), "step": pa.array(steps, pa.int64())}
        self._connection.register("newest", pa.table(columns | {"newest_attempt": pa.array(attempts, pa.int32())}))
        return [
            f"SELECT * EXCLUDE (newest_attempt) FROM ({' UNION ALL '.join(parts)}) LEFT JOIN newest USING (run, step) "
            "WHERE attempt IS NULL OR newest_attempt IS NULL OR attempt = newest_attempt"
        ]

    def _recorded_steps(self, steps: str) -> dict[str, list[int]]:
        within = named_range(steps)
        if within is not None:
            first, last = within
            until = "" if last is None else f" AND step <= {last}"
            found = self._steps_where(f" WHERE step >= {first}{until}")
            if all(select_steps(steps, every) for every in found.values()):
                return found
        return self._steps_where("")

    def _steps_where(self, where: str) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {source.run: [] for source in self._sources}
        query = f"""
            SELECT DISTINCT run, step
            FROM (SELECT run, step FROM sequences UNION ALL SELECT run, step FROM metrics WHERE NOT {_IS_SETTING}){where}
            ORDER BY run, step
        """
        for run, step in self._connection.execute(query).fetchall():
            found[run].append(step)
        return found

    def _wrap(self, view: str, inner: str, clause: str) -> None:
        self._connection.execute(f"ALTER VIEW {view} RENAME TO {inner}")
        self._connection.execute(f"CREATE VIEW {view} AS SELECT * FROM {inner} {clause}")


def step_condition(steps: Sequence[int], recorded: Sequence[int] | None = None) -> str:
    """Return an SQL condition that selects exactly these steps. If no other `recorded` step lies between them, the
    condition is a plain range.

    >>> step_condition([3, 4, 6], [1, 3, 4, 6])
    'step BETWEEN 3 AND 6'
    >>> step_condition([3, 6])
    'step BETWEEN 3 AND 6 AND step IN (3, 6)'
    """
    if isinstance(steps, range):  # a range can be too long to list, e.g. if steps are timestamps
        return f"step BETWEEN {steps.start} AND {steps.stop - 1}" if steps else "false"
    if not len(steps):
        return "false"
    first, last = min(steps), max(steps)
    # Always add the range, because DuckDB skips row groups outside a range, but not those outside a long list.
    within = f"step BETWEEN {first} AND {last}"
    num_known = last + 1 - first if recorded is None else sum(first <= step <= last for step in recorded)
    return within if num_known == len(set(steps)) else f"{within} AND step IN ({', '.join(map(str, steps))})"


def define_view(connection: Connection, name: str, parts: list[str], columns: str, schema: pa.Schema) -> None:
    if not parts:
        connection.register(f"empty_{name}", no_rows(schema))
        parts = [f"SELECT NULL::VARCHAR AS run, {columns} FROM empty_{name}"]
    connection.execute(f"CREATE OR REPLACE VIEW {name} AS {' UNION ALL '.join(parts)}")


def no_rows(schema: pa.Schema) -> pa.Table:
    """Return an empty table. pyarrow's `empty_table` would spend 0.3 s importing pandas."""
    return pa.Table.from_batches([], schema)


def rows_of(files: Sequence[RunFile], columns: str) -> str:
    """Return a query that scans several files at once and adds each row's run."""
    urls, runs = f"[{', '.join(quoted(url) for _, url in files)}]", {run for run, _ in files}
    if len(runs) == 1:
        return f"SELECT {quoted(*runs)} AS run, {columns} FROM read_parquet({urls})"
    # DuckDB reads the run from the folder name, so it need not open the files of runs that the query excludes.
    parsed = f"hive_partitioning = true, hive_types = {{'{RUN_OF_FOLDER}': VARCHAR}}"
    return f"SELECT substr({RUN_OF_FOLDER}, 2) AS run, {columns} FROM read_parquet({urls}, {parsed})"
