"""Choose the files that a query needs from a very large table. To find them, DuckDB plans the query over placeholder
files without data.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from ...tracer.parquet_file import TraceFiles
from ...tracer.snapshot import TableFile
from .connection import Parameters

MANY_FILES = 256

_PROBE_ROWS = 2
_PLANNED = re.compile(r"\s*(SELECT|WITH|FROM|\()", re.IGNORECASE)
_DEFINES = re.compile(r"\s*(CREATE\s+(OR\s+REPLACE\s+)?(VIEW|MACRO)|ALTER|SET|RESET)\b", re.IGNORECASE)
_BOUND = re.compile(r"step\s*(=|>=|<=|>|<)\s*(-?\d+)")
_IN = re.compile(r"(?:optional:\s*)?\(*step\s+IN\s*\((-?\d+(?:,\s*-?\d+)*)\)+")

Steps = tuple[float, float]
"""First and last step, inclusive. A range without a bound is infinite on that side."""
_ALL: Steps = (float("-inf"), float("inf"))


@dataclass(slots=True, kw_only=True)
class _LargeTable:
    view: str
    pattern: str
    columns: str
    files: Sequence[TableFile]
    folder: str
    no_columns: str = ""
    """SELECT list with a typed NULL per column. Queries that only count rows read it instead of files."""

    @property
    def marker(self) -> str:
        return f"planned {self.view}"

    def needed(self, wanted: list[Steps]) -> list[str]:
        return [
            f"{self.folder}/{file.relative}"
            for file in self.files
            if file.steps is None or any(low <= file.steps[1] and file.steps[0] <= high for low, high in wanted)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileChoice:
    names: dict[str, list[str]]
    counted: frozenset[str] = frozenset()


class LargeTables:
    def __init__(self, connection: duckdb.DuckDBPyConnection, files: TraceFiles):
        self._connection, self._files = connection, files
        self._tables: list[_LargeTable] = []
        self._counted: frozenset[str] = frozenset()

    def add(self, view: str, schema: pa.Schema, columns: str, folder: str, files: Sequence[TableFile]) -> None:
        """Define a view that reads a file only when a query needs it. `columns` are SQL expressions."""
        schema = pa.schema([field.with_nullable(True) for field in schema])
        for rows in (0, _PROBE_ROWS):
            content = io.BytesIO()
            table = pa.Table.from_arrays([pa.nulls(rows, field.type) for field in schema], schema=schema)
            pq.write_table(table, content, write_statistics=False)
            self._files.add(f"{view}/{rows}", content.getvalue())
        table = _LargeTable(view=view, pattern=f"{view}/*", columns=columns, folder=folder, files=files)
        self._tables.append(table)
        self._probe(table)
        self._define(table)
        types = self._connection.execute(f"DESCRIBE {view}").fetchall()
        table.no_columns = ", ".join(f'NULL::{of} AS "{name}"' for name, of, *_ in types)

    def choose_all(self) -> None:
        self.take(self._all)

    def choose(self, query: str, parameters: Parameters = None) -> FileChoice | None:
        if _DEFINES.match(query):
            for table in self._tables:
                self._probe(table)
            return None
        is_one = ";" not in query.rstrip().removesuffix(";")
        choice = (self._planned(query, parameters) if is_one and _PLANNED.match(query) else None) or self._all
        self.take(choice)
        return choice

    def take(self, choice: FileChoice) -> None:
        if choice.counted != self._counted:
            self._counted = choice.counted
            for table in self._tables:
                self._probe(table)
                self._define(table)
        for table in self._tables:
            self._files.choose(table.pattern, choice.names[table.pattern] or [f"{table.view}/0"])

    @cached_property
    def _all(self) -> FileChoice:
        return FileChoice(names={table.pattern: table.needed([_ALL]) for table in self._tables})

    def _planned(self, query: str, parameters: Parameters) -> FileChoice | None:
        for table in self._tables:
            self._probe(table)
            self._define(table, f" WHERE writer IS DISTINCT FROM '{table.marker}'")
        before = self._files.num_asked.copy()
        try:
            ((_, plan),) = self._connection.execute(f"EXPLAIN (FORMAT json) {query}", parameters).fetchall()
            scans = list(_scans(json.loads(plan)))
            asked = self._files.num_asked - before
        except (duckdb.Error, ValueError):  # the query is invalid, and running it raises the error
            return None
        finally:
            for table in self._tables:
                self._define(table)
        names, counted = {}, set()
        for table in self._tables:
            found = [scan for scan in scans if any(table.marker in condition for condition in scan.conditions)]
            if len(found) < asked[table.pattern] or not found:
                names[table.pattern] = self._all.names[table.pattern]
                continue
            names[table.pattern] = table.needed([scan.steps for scan in found])
            if all(not scan.columns and len(scan.conditions) == 1 for scan in found):
                counted.add(table.view)
        return FileChoice(names=names, counted=frozenset(counted))

    def _probe(self, table: _LargeTable) -> None:
        self._files.choose(table.pattern, [f"{table.view}/{_PROBE_ROWS}"])

    def _define(self, table: _LargeTable, where: str = "") -> None:
        rows = f"SELECT {table.columns} FROM read_parquet('{self._files.url(table.pattern)}'){where}"
        if not where and table.view in self._counted:
            rows = f"SELECT {table.no_columns} FROM range({sum(file.rows for file in table.files)})"
        self._connection.execute(f"CREATE OR REPLACE VIEW {table.view} AS {rows}")


@dataclass(frozen=True, slots=True)
class _Scan:
    columns: list[str]
    conditions: list[str]

    @property
    def steps(self) -> Steps:
        # With an odd number of quotes, a line break in a string literal split the condition.
        if any(condition.count("'") % 2 for condition in self.conditions):
            return _ALL
        first, last = _ALL
        for condition in self.conditions:
            low, high = _steps_of(condition)
            first, last = max(first, low), min(last, high)
        return first, last


def _steps_of(condition: str) -> Steps:
    """Return the step range that a condition allows, or an unbounded range if the condition is not understood.

    >>> _steps_of("((step >= 3) AND (step < 8))")
    (3, 7)
    >>> _steps_of("optional: (step IN (3, 7, 9))")
    (3, 9)
    >>> _steps_of("((step = 3) OR (step = 5))")
    (-inf, inf)
    """
    if "'" in condition or '"' in condition:
        return _ALL
    if listed := _IN.fullmatch(condition):
        steps = [int(number) for number in listed[1].split(",")]
        return min(steps), max(steps)
    first, last = _ALL
    for term in condition.replace("(", "").replace(")", "").split(" AND "):
        bound = _BOUND.fullmatch(term)
        if bound is None:
            return _ALL
        operator, step = bound[1], int(bound[2])
        if operator in ("=", ">=", ">"):
            first = max(first, step + (operator == ">"))
        if operator in ("=", "<=", "<"):
            last = min(last, step - (operator == "<"))
    return first, last


def _scans(plan: list[dict[str, Any]]) -> Iterator[_Scan]:
    for node in plan:
        if node["name"].strip() == "READ_PARQUET":
            told = node.get("extra_info", {})
            yield _Scan(_several(told.get("Projections")), _several(told.get("Filters")))
        yield from _scans(node.get("children", []))


def _several(told: str | list[str] | None) -> list[str]:
    return [text for text in ([told] if isinstance(told, str) else told or []) if text]
