"""Run SQL over traces, from Python or at a prompt. By default, queries can only read, and only from the traces."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import duckdb

from ..schemas.errors import InvalidOption, InvalidQuery, TimTraceError, TimTraceWarning, option
from ..tracer.parquet_file import PROTOCOL
from .rows import Rows, printable_lines
from .trace.connection import NOT_OF_FILES, ended_by_ctrl_c
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
    return Session(traces, unsafe=unsafe, timeout=timeout, memory=memory, max_rows=max_rows).ask(query)


class Session:
    def __init__(
        self, traces: Traces, *, unsafe: bool = False, timeout: float | None = None, memory: str | None = None,
        max_rows: int | None = None,
    ):  # fmt: skip
        if max_rows is not None and max_rows < 1:
            raise InvalidOption(f"got {max_rows}; use at least 1", option="max_rows")
        self._database = open_database(traces)
        self._unsafe, self._has_facts = unsafe, False
        self._timeout, self._memory, self._max_rows = timeout, memory, max_rows
        if memory is not None:
            set_memory(self._database.connection.raw, memory)
        if not unsafe:
            # Let the connection read only the traces' files, and none of this process's Python variables.
            for setting in (
                f"allowed_directories = ['{PROTOCOL}://']", "python_enable_replacements = false",
                "enable_external_access = false", "lock_configuration = true",
            ):  # fmt: skip
                self._database.connection.execute(f"SET {setting}")

    def ask(self, query: str) -> Rows:
        raw, most = self._database.connection.raw, self._max_rows
        with limited(raw, self._timeout, self._memory):
            found = ended_by_ctrl_c(raw, lambda: self._answer(query))
        if most is None or len(found) <= most:
            return found
        told = (
            f"only the first {most:,} rows are returned; aggregate, add LIMIT, or allow {option('max_rows', 2 * most)}"
        )
        warnings.warn(told, TimTraceWarning, stacklevel=2)
        return Rows(found.columns, found.rows[:most])

    def _answer(self, query: str) -> Rows:
        connection = self._database.connection.raw
        try:
            query.encode()
        except UnicodeEncodeError as error:
            raise InvalidQuery(f"sql: character {error.start + 1} of the query is not UTF-8; remove it") from None
        words = words_of(query)
        self._database.define_named(words)
        if "facts" in words and not self._has_facts:
            self._define_facts()
        try:
            statements = connection.extract_statements(query)
            if not statements:
                raise InvalidQuery("sql: the query is empty; try: SELECT * FROM steps")
            if not self._unsafe:
                for statement in statements:
                    _check_reads(connection, statement)
            result: Any = None
            for statement in statements:
                self._database.views.choose_files(statement.query, None)
                result = connection.execute(statement)
            columns = tuple(column[0] for column in result.description or ())
            if self._max_rows is not None and columns:
                return Rows(columns, result.fetchmany(self._max_rows + 1))
            return Rows(columns, result.fetchall() if columns else [])
        except TimTraceError:
            raise
        except (duckdb.Error, ValueError) as error:  # ValueError: DuckDB's Python API does not know the statement type
            if not isinstance(error, _OF_QUESTION) and (damage := self._database.damage(error)) is not None:
                raise damage from error
            raise InvalidQuery(_explained(str(error))) from error

    def _define_facts(self) -> None:
        from .attribution.attribute import facts_table

        self._has_facts = True
        self._database.connection.register("facts", facts_table(self._database))


def _check_reads(connection: duckdb.DuckDBPyConnection, statement: Any) -> None:
    parts = [statement]
    if statement.type == duckdb.StatementType.EXPLAIN:
        parts = connection.extract_statements(_EXPLAIN.sub("", statement.query, count=1))
    if not all(part.type in _READING for part in parts):
        raise InvalidQuery(f"sql: {statement.type.name} does more than read data; allow it with {option('unsafe')}")


def _explained(message: str) -> str:
    if "file system operations are disabled" in message or "extensions is disabled" in message:
        return f"sql: {message.splitlines()[0]}; a query can only read the trace; allow more with {option('unsafe')}"
    return f"sql: {message.strip()}"


# --- the prompt -----------------------------------------------------------------------------------------------------------

GREETING = (
    "views: sequences scores passes metrics steps tokens; macros: pair pair_sequences pair_steps pair_runs\n"
    "end a query with ; and the session with Ctrl-D"
)


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], str | None]:
    last = arguments[-1]
    is_query = (
        not os.path.exists(last) and "://" not in last.split(maxsplit=1)[0] and (len(arguments) > 1 or " " in last)
    )
    return (list(arguments[:-1]), last) if is_query else (list(arguments), None)


def prompt(session: Session, show: Callable[[Rows], None]) -> None:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (line editing and history for input())
    print(GREETING, file=sys.stderr)
    while (query := _read()) is not None:
        if not query.strip(" ;\n"):
            continue
        try:
            show(session.ask(query))
        except InvalidQuery as error:
            print(printable_lines(str(error)), file=sys.stderr)


def _read() -> str | None:
    lines: list[str] = []
    while not lines or not lines[-1].rstrip().endswith(";"):
        try:
            lines.append(input("tim-trace> " if not lines else "       ... "))
        except EOFError:
            print(file=sys.stderr)
            return None
        except KeyboardInterrupt:
            print(file=sys.stderr)
            lines = []
    return "\n".join(lines)
