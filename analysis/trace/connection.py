"""Connect to DuckDB, and report its file errors as tim-trace errors that name the file."""

from __future__ import annotations

import atexit
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar
from weakref import WeakSet

import duckdb
import numpy as np
import pyarrow as pa

from ...schemas.errors import StorageError, TimTraceError
from .macros import words_of

Made = TypeVar("Made")

_most: list[int] = []


def limit_threads(most: int) -> None:
    _most[:] = [most]


def num_threads() -> int:
    return min([os.cpu_count() or 1, *_most])


BATCH_ROWS = 1024

Parameters = Sequence[object] | Mapping[str, object] | None

NOT_OF_FILES = (
    duckdb.BinderException, duckdb.CatalogException, duckdb.ParserException, duckdb.SyntaxException,
    duckdb.NotImplementedException, duckdb.InterruptException,
)  # fmt: skip


def _nothing() -> None: ...


def ended_by_ctrl_c(raw: duckdb.DuckDBPyConnection, run: Callable[[], Made]) -> Made:
    """Run a user's query in another thread, so that Ctrl-C ends the query at once. On the main thread, DuckDB does not
    always check for Ctrl-C."""
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run)
        try:
            return running.result()
        except KeyboardInterrupt:
            raw.interrupt()
            raise


class Connection:
    def __init__(self, raw: duckdb.DuckDBPyConnection, explain: Callable[[Exception], TimTraceError]):
        self.raw = raw
        self._explain = explain
        self.define_named: Callable[[frozenset[str]], None] = lambda words: None
        self.choose_files: Callable[[str, Parameters], Callable[[], None]] = lambda query, parameters: _nothing
        _open.add(raw)

    def execute(self, query: str, parameters: Parameters = None) -> Result:
        self.define_named(words_of(query))
        self.choose_files(query, parameters)
        with self.explained():
            return Result(self.raw.execute(query, parameters), self)

    def sql(self, query: str, params: Parameters = None) -> Result:
        self.define_named(words_of(query))
        choose_again = self.choose_files(query, params)
        with self.explained():
            return Result(self.raw.sql(query, params=params), self, choose_again)

    def batches(self, query: str, num_rows: int | None = None) -> Batches:
        self.use_threads()
        return self.sql(query).to_arrow_reader(num_rows or BATCH_ROWS)

    def use_threads(self) -> None:
        self.execute(f"SET threads = {num_threads()}" if _most else "RESET threads")

    def mapped_batches(
        self, query: str, function: Callable[[pa.RecordBatch], Made], num_rows: int | None = None
    ) -> Iterator[Made]:
        """Apply a function to batches of a query's rows, in several threads. If there are no rows, the function is
        called with one empty batch."""
        rows, is_empty = self.batches(query, num_rows), True
        waiting: deque[Future[Made]] = deque()
        with ThreadPoolExecutor(num_threads()) as pool:
            for batch in rows:
                is_empty = False
                waiting.append(pool.submit(function, batch))
                if len(waiting) > 2 * num_threads():
                    yield waiting.popleft().result()
            for future in waiting:
                yield future.result()
        if is_empty:
            yield function(pa.RecordBatch.from_pylist([], rows.schema))

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Raise DuckDB's file errors as tim-trace errors, and KeyboardInterrupt on Ctrl-C, even while DuckDB reads
        files through Python."""
        try:
            yield
        except Exception as error:
            if str(error) == "Query interrupted" or "KeyboardInterrupt" in str(error):
                raise KeyboardInterrupt from error
            is_of_files = isinstance(error, (duckdb.Error, pa.ArrowException, OSError))
            if not is_of_files or isinstance(error, (*NOT_OF_FILES, StorageError)):
                raise
            raise self._explain(error) from error

    @contextmanager
    def registered(self, name: str, rows: pa.Table) -> Iterator[None]:
        self.register(name, rows)
        try:
            yield
        finally:
            self.unregister(name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


_open: WeakSet[duckdb.DuckDBPyConnection] = WeakSet()


@atexit.register
def _close_all() -> None:
    """Close all connections. Otherwise, DuckDB threads that read through Python abort the process at exit."""
    for connection in list(_open):
        connection.close()


class Result:
    def __init__(
        self, raw: duckdb.DuckDBPyConnection | duckdb.DuckDBPyRelation, connection: Connection,
        choose_again: Callable[[], None] = _nothing,
    ):  # fmt: skip
        self._raw, self._connection, self._choose_again = raw, connection, choose_again

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(column[0] for column in self._raw.description)

    def fetchall(self) -> list[tuple[Any, ...]]:
        rows: list[tuple[Any, ...]] = self._fetched("fetchall")
        return rows

    def fetchnumpy(self) -> dict[str, np.ndarray]:
        columns: dict[str, np.ndarray] = self._fetched("fetchnumpy")
        return columns

    def to_arrow_table(self) -> pa.Table:
        return self._fetched("to_arrow_table")

    def to_arrow_reader(self, batch_size: int) -> Batches:
        return Batches(self._fetched("to_arrow_reader", batch_size), self._connection)

    def _fetched(self, method: str, *arguments: int) -> Any:
        with self._connection.explained():
            self._choose_again()
            return getattr(self._raw, method)(*arguments)


class Batches:
    def __init__(self, raw: pa.RecordBatchReader, connection: Connection):
        self._raw, self._connection = raw, connection
        self.schema: pa.Schema = raw.schema

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        with self._connection.explained():
            yield from self._raw
