"""Run SQL over traces, from Python or the command line. By default, queries can only read, and only from the traces."""

from __future__ import annotations

import re

import duckdb

from ..schemas.errors import InvalidOption, InvalidQuery, TimTraceError, option, warn
from ..tracer.parquet_file import PROTOCOL
from .rows import Rows
from .trace.connection import NOT_OF_FILES, ended_by_ctrl_c
from .trace.database import Database
from .trace.limits import limited, set_memory
from .trace.macros import words_of
from .trace.source import Traces
from .views import open_database

_READING = {duckdb.StatementType.SELECT, duckdb.StatementType.MULTI}  # MULTI: PIVOT
_OF_QUESTION = (
    *NOT_OF_FILES, duckdb.PermissionException, duckdb.ConversionException, duckdb.OutOfRangeException, ValueError,
)  # fmt: skip
"""DuckDB errors that are caused by the query rather than by the files."""
_EXPLAIN = re.compile(r"\s*explain\s+(analyze\s+|\([^)]*\)\s*)*", re.IGNORECASE)


def sql(
    traces: Traces, query: str, *, unsafe: bool = False, timeout: float | None = None, memory: str | None = None,
    max_rows: int | None = None,
) -> Rows:  # fmt: skip
    """Run a DuckDB SQL query on one or more traces.

    The docstring of `connect` lists the views and macros. Unless `unsafe` is set, a query can only read, and only from
    the traces. `timeout` is in seconds. `memory` is a size such as 500MB; on Linux, the whole process cannot allocate
    more memory than this while the query runs. Raises InvalidQuery with DuckDB's message if the query is wrong, or if
    it exceeds a limit. Returns at most `max_rows` rows, and warns if there are more.
    """
    if max_rows is not None and max_rows < 1:
        raise InvalidOption(f"got {max_rows}; use at least 1", option="max_rows")
    database = open_database(traces)
    raw = database.connection.raw
    if memory is not None:
        set_memory(raw, memory)
    if not unsafe:
        # Let the connection read only the traces' files, and none of this process's Python variables.
        for setting in (
            f"allowed_directories = ['{PROTOCOL}://']", "python_enable_replacements = false",
            "enable_external_access = false", "lock_configuration = true",
        ):  # fmt: skip
            database.connection.execute(f"SET {setting}")
    with limited(raw, timeout, memory):
        found = ended_by_ctrl_c(raw, lambda: _answer(database, query, unsafe, max_rows))
    if max_rows is None or len(found) <= max_rows:
        return found
    told = f"only the first {max_rows:,} rows are returned; aggregate, add LIMIT, or set {option('max_rows', 2 * max_rows)}"
    warn(told)
    return Rows(found.columns, found.rows[:max_rows])


def _answer(database: Database, query: str, unsafe: bool, max_rows: int | None) -> Rows:
    """Return up to `max_rows` + 1 rows of the query's result."""
    connection = database.connection.raw
    try:
        query.encode()
    except UnicodeEncodeError as error:
        raise InvalidQuery(f"sql: character {error.start + 1} of the query is not UTF-8; remove it") from None
    words = words_of(query)
    database.define_named(words)
    if "facts" in words:
        from .attribution.attribute import facts_table

        database.connection.register("facts", facts_table(database))
    try:
        statements = connection.extract_statements(query)
        if not statements:
            raise InvalidQuery("sql: the query is empty; try: SELECT * FROM steps")
        if not unsafe:
            for statement in statements:
                _check_reads(connection, statement)
        result = connection
        for statement in statements:
            database.views.choose_files(statement.query, None)
            result = connection.execute(statement)
        columns = tuple(column[0] for column in result.description or ())
        if max_rows is not None and columns:
            return Rows(columns, result.fetchmany(max_rows + 1))
        return Rows(columns, result.fetchall() if columns else [])
    except TimTraceError:
        raise
    except (duckdb.Error, ValueError) as error:  # ValueError: DuckDB's Python API does not know the statement type
        if not isinstance(error, _OF_QUESTION) and (damage := database.damage(error)) is not None:
            raise damage from error
        raise InvalidQuery(_explained(str(error))) from error


def _check_reads(connection: duckdb.DuckDBPyConnection, statement: duckdb.Statement) -> None:
    parts = [statement]
    if statement.type == duckdb.StatementType.EXPLAIN:
        parts = connection.extract_statements(_EXPLAIN.sub("", statement.query, count=1))
    if not all(part.type in _READING for part in parts):
        raise InvalidQuery(f"sql: {statement.type.name} does more than read data; allow it with {option('unsafe')}")


def _explained(message: str) -> str:
    if "file system operations are disabled" in message or "extensions is disabled" in message:
        return f"sql: {message.splitlines()[0]}; a query can only read the trace; allow more with {option('unsafe')}"
    return f"sql: {message.strip()}"
