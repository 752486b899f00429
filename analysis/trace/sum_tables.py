"""Tables of sums: those stored in traces, those computed since the traces were opened, and the choice between the
two."""

from __future__ import annotations

import shutil
import tempfile
import uuid
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from ...schemas.layout import SUMS
from ...schemas.sums import KINDS, OF_RUNS, SEQUENCE_SUMS, STATISTICS, STEP_HISTOGRAMS
from ...schemas.tables import Table
from ...tracer.parquet_file import checked_writer
from .connection import Connection
from .macros import quoted, sql_file
from .source import Pair, Source, made_of_metadata, run_folder, sums_file
from .table_views import TableViews, define_view, no_rows, rows_of

IN_FILES = (SEQUENCE_SUMS, STEP_HISTOGRAMS)
"""Kinds with one or more rows per sequence, or many rows per step; computed rows are written to files, as they may
exceed memory."""
_IN_TABLES = tuple(spec for spec in KINDS.values() if spec not in IN_FILES)
"""Kinds whose computed rows are in DuckDB tables."""

SUMS_OPTIONS: dict[str, Any] = {"compression": "zstd", "use_dictionary": ["pass_a", "pass_b"]}
"""Options of pyarrow's ParquetWriter used for files of sums."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputedFile:
    """A file with computed sums of one run."""

    run: str
    kind: str
    pair: Pair
    path: Path
    relative: str
    """Path of the file relative to the trace's root when it is stored there."""


@dataclass(slots=True, kw_only=True)
class Coverage:
    """Pair whose tables cover every sequence, or every run, in the views -> True if the sums were computed, False if
    stored.
    """

    sequences: dict[Pair, bool] = field(default_factory=dict)
    runs: dict[Pair, bool] = field(default_factory=dict)


class SumTables:
    """Tables of sums for several traces. Temporary files with computed sums are deleted together with this object."""

    def __init__(self, connection: Connection, views: TableViews, sources: Sequence[Source]):
        self._connection = connection
        self._kept = [
            (kind, pair, views.add_file(source, file.relative, file))
            for source in sources
            for kind, pairs in source.sums.items()
            for pair, file in pairs.items()
        ]
        """Kind, pair, and run with URL, for every file of sums stored in a trace."""
        self._coverage = Coverage(
            sequences=dict.fromkeys(set.intersection(*(source.covered for source in sources)), False),
            runs=dict.fromkeys(set.intersection(*(source.run_covered for source in sources)), False),
        )
        self._condition = ""
        """SQL condition on `step` that selects the steps in the views; empty if the views hold all steps."""
        self.files: list[ComputedFile] = []
        self._folder: Path | None = None
        for spec in _IN_TABLES:
            connection.register(f"empty_{spec.name}", no_rows(spec.schema))
            connection.execute(
                f"CREATE TABLE computed_{spec.name} AS SELECT NULL::VARCHAR AS run, {_names(spec)} FROM empty_{spec.name}"
            )
        self._define()

    def covers(self, pair: Pair, *, runs: bool = False) -> bool:
        """Return True if the tables contain the sums of every sequence of a pair or, with `runs`, of every run."""
        return pair in (self._coverage.runs if runs else self._coverage.sequences)

    def is_computed(self, pair: Pair, *, runs: bool = False) -> bool:
        """Return True if the tables contain computed sums of a pair instead of stored ones."""
        return (self._coverage.runs if runs else self._coverage.sequences).get(pair, False)

    def begin(self, pair: Pair) -> None:
        """Discard the computed sums of a pair, so that the tables contain the stored ones."""
        self._coverage.sequences.pop(pair, None)
        self._coverage.runs.pop(pair, None)
        self._forget(pair)
        self._define()

    def supersede(self, pair: Pair, *, runs: bool = False) -> None:
        """Use the computed sums of a pair, for every sequence or every run, instead of those stored in traces."""
        (self._coverage.runs if runs else self._coverage.sequences)[pair] = True
        self._define()

    def narrow(self, condition: str) -> None:
        """Limit the tables to the steps selected by a condition; stored sums over whole runs are no longer used."""
        self._condition = condition
        self._coverage.runs.clear()
        self._define()

    def forget(self) -> bool:
        """Stop using any sums, and discard the computed ones. Return False if none were in use."""
        if self._coverage == Coverage():
            return False
        self._coverage = Coverage()
        self._forget()
        self._define()
        return True

    def kept(self, spec: Table, pair: Pair, runs: Collection[str]) -> str:
        """Return a query for the sums of a pair stored for some runs, whether or not the tables currently include
        them."""
        files = [file for *known, file in self._kept if known == [spec.name, pair] and file[0] in runs]
        return rows_of(files, _names(spec))

    @contextmanager
    def writing(self, source: Source, spec: Table, pair: Pair) -> Iterator[Callable[[pa.Table], None]]:
        """Yield a function that appends rows to the computed sums of a run; each call writes one row group."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="tim-trace-"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        path = self._folder / run_folder(source.run) / f"{spec.name}-{uuid.uuid4().hex}.parquet"
        path.parent.mkdir(exist_ok=True)
        schema = sums_schema(source, pair, spec)
        with checked_writer(path, f"{SUMS}/{spec.name}", schema, **SUMS_OPTIONS) as writer:
            yield lambda rows: writer.write(rows.cast(schema))
        assert writer.sealed.footer is not None
        relative = sums_file(spec.name, writer.sealed.footer)
        self.files.append(ComputedFile(run=source.run, kind=spec.name, pair=pair, path=path, relative=relative))

    def define_lookup(self) -> None:
        """Define the macros that read the tables for pairs that they cover, and tokens for other pairs."""
        columns = ", ".join(["run", *(c.name for c in SEQUENCE_SUMS.columns if c.name not in ("pass_a", "pass_b"))])
        self._connection.raw.execute(
            sql_file("lookup").format(
                covered=_listed(self._coverage.sequences),
                run_covered=_listed(self._coverage.runs),
                sum_columns=columns,
                statistics=", ".join(STATISTICS),
            )
        )

    def _forget(self, pair: Pair | None = None) -> None:
        """Discard the computed sums of a pair, or of all pairs if `pair` is None."""
        where = "" if pair is None else f" WHERE pass_a = {quoted(pair[0])} AND pass_b = {quoted(pair[1])}"
        for spec in _IN_TABLES:
            self._connection.execute(f"DELETE FROM computed_{spec.name}{where}")
        gone = [file for file in self.files if pair in (None, file.pair)]
        self.files = [file for file in self.files if file not in gone]
        for file in gone:
            file.path.unlink(missing_ok=True)

    def _define(self) -> None:
        """Define one view per kind of sums: computed sums, and stored sums of pairs without computed ones."""
        for spec in KINDS.values():
            columns = _names(spec)
            files = [
                file
                for kind, pair, file in self._kept
                if kind == spec.name
                and not (self.is_computed(pair) or (spec in OF_RUNS and self.is_computed(pair, runs=True)))
            ]
            if self._condition and spec in OF_RUNS:  # stored sums over a whole run include all of its steps
                files = []
            parts = [rows_of(files, columns)] if files else []
            if self._condition:
                parts = [f"SELECT * FROM ({part}) WHERE {self._condition}" for part in parts]
            if spec in _IN_TABLES:
                parts.append(f"SELECT run, {columns} FROM computed_{spec.name}")
            elif computed := [(file.run, str(file.path)) for file in self.files if file.kind == spec.name]:
                parts.append(rows_of(computed, columns))
            define_view(self._connection, spec.name, parts, columns, spec.schema)


def sums_schema(source: Source, pair: Pair, spec: Table) -> pa.Schema:
    """Return the schema for sums of all sealed rows of a trace, with metadata that names the sealed files used."""
    return spec.schema.with_metadata(made_of_metadata(spec.name, pair, source.segments))


def _names(spec: Table) -> str:
    return ", ".join(column.name for column in spec.columns)


def _listed(pairs: Collection[Pair]) -> str:
    # Without pairs the list holds a name that no pair has, because `x IN (NULL)` would be NULL.
    return ", ".join(quoted(f"{a} {b}") for a, b in sorted(pairs)) or "''"
