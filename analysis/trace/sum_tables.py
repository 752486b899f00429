"""Tables of sums that were stored in traces, or computed since the traces were opened and then stored."""

from __future__ import annotations

import shutil
import tempfile
import uuid
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from ...schemas.layout import SUMS
from ...schemas.sums import KINDS, OF_RUNS, SEQUENCE_SUMS, STATISTICS, STEP_HISTOGRAMS, STEP_QUANTILES, STEP_STATISTICS
from ...schemas.tables import Table
from ...tracer.index import write_index
from ...tracer.parquet_file import checked_writer, write_checked
from ...tracer.whole_file import unnamed_file
from .connection import Connection
from .macros import quoted, sql_file
from .source import Pair, Source, run_folder, sums_file, sums_schema
from .table_views import TableViews, define_view, no_rows, rows_of

IN_FILES = (SEQUENCE_SUMS, STEP_HISTOGRAMS)
_IN_TABLES = tuple(spec for spec in KINDS.values() if spec not in IN_FILES)

_DICTIONARIES = ["pass_a", "pass_b"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputedFile:
    run: str
    kind: str
    pair: Pair
    path: Path
    relative: str


class SumTables:
    """Tables of sums over several traces. The temporary files are deleted when this object is garbage-collected."""

    def __init__(self, connection: Connection, views: TableViews, sources: Sequence[Source]):
        self._connection, self._views, self._sources = connection, views, sources
        self._kept = [
            (kind, pair, views.add_file(source, file.relative, file))
            for source in sources
            for kind, pairs in source.sums.items()
            for pair, file in pairs.items()
        ]
        self._sequences = dict.fromkeys(set.intersection(*(source.covered for source in sources)), False)
        """Pairs with sums for every sequence in the views: True if computed, False if stored."""
        self._runs = dict.fromkeys(set.intersection(*(source.run_covered for source in sources)), False)
        self._condition = ""
        self.files: list[ComputedFile] = []
        self._folder: Path | None = None
        for spec in _IN_TABLES:
            connection.register(f"empty_{spec.name}", no_rows(spec.schema))
            connection.execute(
                f"CREATE TABLE computed_{spec.name} AS SELECT NULL::VARCHAR AS run, {', '.join(spec.schema.names)} FROM empty_{spec.name}"
            )
        self._define()

    def covers(self, pair: Pair, *, runs: bool = False) -> bool:
        return pair in (self._runs if runs else self._sequences)

    def is_computed(self, pair: Pair, *, runs: bool = False) -> bool:
        return (self._runs if runs else self._sequences).get(pair, False)

    def supersede(self, pair: Pair, *, runs: bool = False) -> None:
        (self._runs if runs else self._sequences)[pair] = True
        self._define()

    def narrow(self, condition: str) -> None:
        """Limit the tables to steps that meet a condition, and stop using sums over whole runs."""
        self._condition = condition
        self._runs.clear()
        self._define()

    def forget(self, pair: Pair | None = None) -> bool:
        """Drop a pair's sums, or the sums of all pairs. Return False if there are no sums."""
        dropped = [*self._sequences, *self._runs] if pair is None else [pair]
        if not dropped:
            return False
        for one in dropped:
            self._sequences.pop(one, None)
            self._runs.pop(one, None)
        where = "" if pair is None else f" WHERE pass_a = {quoted(pair[0])} AND pass_b = {quoted(pair[1])}"
        for spec in _IN_TABLES:
            self._connection.execute(f"DELETE FROM computed_{spec.name}{where}")
        gone = [file for file in self.files if pair in (None, file.pair)]
        self.files = [file for file in self.files if file not in gone]
        for file in gone:
            file.path.unlink(missing_ok=True)
        self._define()
        return True

    def kept(self, spec: Table, pair: Pair, runs: Collection[str]) -> str:
        files = [file for *known, file in self._kept if known == [spec.name, pair] and file[0] in runs]
        return rows_of(files, ", ".join(spec.schema.names))

    @contextmanager
    def writing(self, source: Source, spec: Table, pair: Pair) -> Iterator[Callable[[pa.Table], None]]:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="tim-trace-"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        path = self._folder / run_folder(source.run) / f"{spec.name}-{uuid.uuid4().hex}.parquet"
        path.parent.mkdir(exist_ok=True)
        schema = sums_schema(source, pair, spec)
        identity = f"{SUMS}/{spec.name}"
        with checked_writer(path, identity, schema, compression="zstd", use_dictionary=_DICTIONARIES) as writer:
            yield lambda rows: writer.write(rows.cast(schema))
        assert writer.sealed.footer is not None
        relative = sums_file(spec.name, writer.sealed.footer)
        self.files.append(ComputedFile(run=source.run, kind=spec.name, pair=pair, path=path, relative=relative))

    def keep(self, pair: Pair) -> bool:
        """Write a pair's sums into every local, finished, writable trace. Return True if all traces received them."""
        if not self._views.is_whole:
            return False
        kinds = [STEP_QUANTILES, STEP_STATISTICS] if self.is_computed(pair) else []
        kinds += OF_RUNS if self.covers(pair, runs=True) else ()
        rows = {}
        for spec in kinds:
            columns = ", ".join(["run", *spec.schema.names])
            query = f"SELECT {columns} FROM computed_{spec.name} WHERE pass_a = ? AND pass_b = ? ORDER BY ALL"
            computed = self._connection.sql(query, params=[*pair]).to_arrow_table()
            rows[spec.name] = by_run(computed, [source.run for source in self._sources])
        return all([self._keep_in(source, pair, rows) for source in self._sources])

    def _keep_in(self, source: Source, pair: Pair, rows: Mapping[str, Mapping[str, pa.Table]]) -> bool:
        if not source.store.is_local or source.is_live or source.journals:
            return False
        folder = Path(source.store.root)
        try:
            for file in self.files:
                if file.pair == pair and file.run == source.run:
                    with unnamed_file(folder, SUMS) as temporary:
                        shutil.copyfile(file.path, temporary)
                        temporary.rename(folder / file.relative)
                    _remove_outdated(source, pair, file.kind)
            for kind, of_runs in rows.items():
                write_sums(source, pair, KINDS[kind], of_runs[source.run])
            write_index(folder)
        except OSError:
            return False
        return True

    def define_lookup(self) -> None:
        filled = {"covered": _listed(self._sequences), "run_covered": _listed(self._runs)}
        filled |= {"sum_columns": ", ".join(["run", *without_pair(SEQUENCE_SUMS)]), "statistics": ", ".join(STATISTICS)}
        self._connection.raw.execute(sql_file("lookup").format(**filled))

    def _define(self) -> None:
        for spec in KINDS.values():
            columns = ", ".join(spec.schema.names)
            files = [
                file
                for kind, pair, file in self._kept
                if kind == spec.name
                and not (self.is_computed(pair) or (spec in OF_RUNS and self.is_computed(pair, runs=True)))
            ]
            if self._condition and spec in OF_RUNS:  # stored sums over a run include steps that are not in the views
                files = []
            parts = [rows_of(files, columns)] if files else []
            if self._condition:
                parts = [f"SELECT * FROM ({part}) WHERE {self._condition}" for part in parts]
            if spec in _IN_TABLES:
                parts.append(f"SELECT run, {columns} FROM computed_{spec.name}")
            elif computed := [(file.run, str(file.path)) for file in self.files if file.kind == spec.name]:
                parts.append(rows_of(computed, columns))
            define_view(self._connection, spec.name, parts, columns, spec.schema)


def write_sums(source: Source, pair: Pair, spec: Table, rows: pa.Table) -> None:
    schema = sums_schema(source, pair, spec)
    folder, identity, parts = Path(source.store.root), f"{SUMS}/{spec.name}", [rows.cast(schema)]
    with unnamed_file(folder, SUMS) as temporary:
        written = write_checked(temporary, identity, schema, parts, compression="zstd", use_dictionary=_DICTIONARIES)
        assert written.footer is not None
        temporary.rename(folder / sums_file(spec.name, written.footer))
    _remove_outdated(source, pair, spec.name)


def _remove_outdated(source: Source, pair: Pair, kind: str) -> None:
    """Delete the sums that were outdated when the trace was opened. Files replaced since then are kept, because other
    processes may still read them."""
    for relative in source.outdated_sums.get((kind, pair), []):
        Path(source.store.root, relative).unlink(missing_ok=True)


def by_run(rows: pa.Table, runs: Iterable[str]) -> dict[str, pa.Table]:
    """Split a table into one table per run. The rows of a run must be contiguous."""
    found, start = {run: rows.slice(0, 0) for run in runs}, 0
    for counted in rows["run"].value_counts().to_pylist():
        found[counted["values"]] = rows.slice(start, counted["counts"])
        start += counted["counts"]
    return {run: of_run.drop_columns("run") for run, of_run in found.items()}


def without_pair(spec: Table) -> list[str]:
    return [name for name in spec.schema.names if name not in ("pass_a", "pass_b")]


def _listed(pairs: Collection[Pair]) -> str:
    # If there are no pairs, list a name that no pair has. An empty list is invalid SQL, and `x IN (NULL)` is NULL.
    return ", ".join(quoted(f"{a} {b}") for a, b in sorted(pairs)) or "''"
