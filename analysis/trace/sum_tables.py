"""The tables of sums: what traces keep of pairs, what was computed since they were opened, and which of both serves."""

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
from .connection import Connection, quoted
from .macros import sql_file
from .source import Pair, Source, made_of_metadata, run_folder, sums_file
from .table_views import TableViews, define_view, no_rows, rows_of

IN_FILES = (SEQUENCE_SUMS, STEP_HISTOGRAMS)
"""Kinds with one row or more per sequence, or many per step: computed ones are files, which may be larger than memory."""
_IN_TABLES = tuple(spec for spec in KINDS.values() if spec not in IN_FILES)
"""Kinds of which computed ones are tables of DuckDB."""

SUMS_OPTIONS: dict[str, Any] = {"compression": "zstd", "use_dictionary": ["pass_a", "pass_b"]}
"""How sums are written: options of pyarrow's ParquetWriter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputedFile:
    """Computed sums of one run."""

    run: str
    kind: str
    pair: Pair
    path: Path
    relative: str
    """Where a trace keeps it."""


@dataclass(slots=True, kw_only=True)
class Coverage:
    """Pairs whose tables of sums hold every sequence or every run that the views hold -> whether these were computed here, not kept."""

    sequences: dict[Pair, bool] = field(default_factory=dict)
    runs: dict[Pair, bool] = field(default_factory=dict)


class SumTables:
    """Tables of sums of several traces, with the files that hold what was computed; these are removed with it."""

    def __init__(self, connection: Connection, views: TableViews, sources: Sequence[Source]):
        self._connection = connection
        self._kept = [
            (kind, pair, views.add_file(source, file.relative, file))
            for source in sources
            for kind, pairs in source.sums.items()
            for pair, file in pairs.items()
        ]
        """Kind, pair, run and URL of every file of sums that a trace keeps."""
        self._coverage = Coverage(
            sequences=dict.fromkeys(set.intersection(*(source.covered for source in sources)), False),
            runs=dict.fromkeys(set.intersection(*(source.run_covered for source in sources)), False),
        )
        self._condition = ""
        """Of the steps that the views hold; empty where they hold all."""
        self.files: list[ComputedFile] = []
        self._folder: Path | None = None
        for spec in _IN_TABLES:
            connection.register(f"empty_{spec.name}", no_rows(spec.schema))
            connection.execute(
                f"CREATE TABLE computed_{spec.name} AS SELECT NULL::VARCHAR AS run, {_names(spec)} FROM empty_{spec.name}"
            )
        self._define()

    def covers(self, pair: Pair, *, runs: bool = False) -> bool:
        """Whether the tables hold the sums of every sequence of a pair; `runs`: those of every run."""
        return pair in (self._coverage.runs if runs else self._coverage.sequences)

    def is_computed(self, pair: Pair, *, runs: bool = False) -> bool:
        """Whether the sums of a pair were computed here, so that the tables hold none that a trace keeps."""
        return (self._coverage.runs if runs else self._coverage.sequences).get(pair, False)

    def begin(self, pair: Pair) -> None:
        """Forget what was computed of a pair: the tables hold what the traces keep."""
        self._coverage.sequences.pop(pair, None)
        self._coverage.runs.pop(pair, None)
        self._forget(pair)
        self._define()

    def supersede(self, pair: Pair, *, runs: bool = False) -> None:
        """Let what was computed serve for every sequence of a pair, or every run, in the place of what traces keep."""
        (self._coverage.runs if runs else self._coverage.sequences)[pair] = True
        self._define()

    def narrow(self, condition: str) -> None:
        """Let the tables hold steps alone for which a condition holds; of whole runs they hold nothing that is kept."""
        self._condition = condition
        self._coverage.runs.clear()
        self._define()

    def distrust(self) -> None:
        """Let no sums serve that were kept or computed: the views hold other sequences now."""
        self._coverage = Coverage()

    def forget(self) -> None:
        """Let no sums serve, and forget those that were computed."""
        self.distrust()
        self._forget()
        self._define()

    def kept(self, spec: Table, pair: Pair, runs: Collection[str]) -> str:
        """A query for what the traces of some runs keep of a pair, whether the tables hold it or not."""
        files = [file for *known, file in self._kept if known == [spec.name, pair] and file[0] in runs]
        return rows_of(files, _names(spec))

    @contextmanager
    def writing(self, source: Source, spec: Table, pair: Pair) -> Iterator[Callable[[pa.Table], None]]:
        """Give a function that adds rows to the computed sums of a run; each call's are a row group."""
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
        """Define the macros that read the tables where they cover a pair, and tokens where they do not."""
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
        """Remove what was computed of a pair, or all."""
        where = "" if pair is None else f" WHERE pass_a = {quoted(pair[0])} AND pass_b = {quoted(pair[1])}"
        for spec in _IN_TABLES:
            self._connection.execute(f"DELETE FROM computed_{spec.name}{where}")
        gone = [file for file in self.files if pair in (None, file.pair)]
        self.files = [file for file in self.files if file not in gone]
        for file in gone:
            file.path.unlink(missing_ok=True)

    def _define(self) -> None:
        """Define the view of each kind: kept sums of pairs that were not computed here, and computed ones."""
        for spec in KINDS.values():
            columns = _names(spec)
            files = [
                file
                for kind, pair, file in self._kept
                if kind == spec.name
                and not (self.is_computed(pair) or (spec in OF_RUNS and self.is_computed(pair, runs=True)))
            ]
            if self._condition and spec in OF_RUNS:  # what is kept of a whole run is of all its steps
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
    """The schema of sums of all sealed rows of a trace, which says what they are made of."""
    return spec.schema.with_metadata(made_of_metadata(spec.name, pair, source.segments))


def _names(spec: Table) -> str:
    return ", ".join(column.name for column in spec.columns)


def _listed(pairs: Collection[Pair]) -> str:
    # Of no pair at all the list holds a name that none has: `x IN (NULL)` would be NULL.
    return ", ".join(quoted(f"{a} {b}") for a, b in sorted(pairs)) or "''"
