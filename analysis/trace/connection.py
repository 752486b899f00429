"""DuckDB over traces: what it raises for their files becomes an error of ours that names the file."""

from __future__ import annotations

import atexit
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar
from weakref import WeakSet

import duckdb
import pyarrow as pa

from ...schemas.errors import StorageError, TimTraceError
from .macros import words_of

Item = TypeVar("Item")

_most: list[int] = []
"""The limit, where there is one."""


def limit_threads(most: int) -> None:
    """Let readings of this process use so many threads at most."""
    _most[:] = [most]


def num_threads() -> int:
    """Threads of a reading: as many as there are cores, unless they were limited."""
    return min([os.cpu_count() or 1, *_most])


def is_limited() -> bool:
    """Whether they were."""
    return bool(_most)


def mapped(pool: Executor, function: Callable[[Item], Made], items: Iterable[Item]) -> Iterator[Made]:
    """Results of a function, in the order of its items; a few items are taken ahead, not all of them."""
    waiting: deque[Future[Made]] = deque()
    for item in items:
        waiting.append(pool.submit(function, item))
        if len(waiting) > 2 * num_threads():
            yield waiting.popleft().result()
    for future in waiting:
        yield future.result()


Made = TypeVar("Made")

BATCH_ROWS = 1024
"""Rows that are handed to a thread at once."""

Explain = Callable[[Exception], TimTraceError]
"""What an error says of the traces."""


Parameters = Sequence[Any] | Mapping[str, Any] | None

NOT_OF_FILES = (
    duckdb.BinderException, duckdb.CatalogException, duckdb.ParserException, duckdb.SyntaxException,
    duckdb.NotImplementedException, duckdb.InterruptException,
)  # fmt: skip
"""What is wrong with the question, or ended by who asked it."""


def quoted(text: str) -> str:
    """Return a text as a literal of SQL."""
    return "'" + text.replace("'", "''") + "'"


def quoted_pair(pair: tuple[str, str]) -> str:
    """Return both passes of a pair as arguments of a macro."""
    return f"{quoted(pair[0])}, {quoted(pair[1])}"


def _nothing() -> None: ...


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise Ctrl-C as Python does: DuckDB makes another error of it, in its own code and where it reads through Python."""
    try:
        yield
    except Exception as error:
        if str(error) == "Query interrupted" or "KeyboardInterrupt" in str(error):
            raise KeyboardInterrupt from error
        raise


def ended_by_ctrl_c(raw: duckdb.DuckDBPyConnection, run: Callable[[], Made]) -> Made:
    """Run a query of somebody else's, which Ctrl-C ends at once: on the main thread DuckDB may go on without a look at it."""
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run)
        try:
            return running.result()
        except KeyboardInterrupt:
            raw.interrupt()
            raise


class Connection:
    """A DuckDB connection that is asked questions of our own. What it does not define is DuckDB's."""

    def __init__(self, raw: duckdb.DuckDBPyConnection, explain: Explain):
        self.raw = raw
        self._explain = explain
        self.define_named: Callable[[frozenset[str]], None] = lambda words: None
        """Makes macros known that a question names, given its words."""
        self.choose_files: Callable[[str, Parameters], Callable[[], None]] = lambda query, parameters: _nothing
        """Has a question read the files that it needs; what it gives has the same question read them again."""
        _open.add(raw)

    def execute(self, query: Any, parameters: Parameters = None) -> Result:
        """Run statements, and return the last one's rows."""
        if isinstance(query, str):
            self.define_named(words_of(query))
            self.choose_files(query, parameters)
        with self.explained():
            return Result(self.raw.execute(query, parameters), self)

    def sql(self, query: str, params: Parameters = None) -> Result:
        """A query whose rows are computed when they are asked for."""
        self.define_named(words_of(query))
        choose_again = self.choose_files(query, params)
        with self.explained():
            return Result(self.raw.sql(query, params=params), self, choose_again)

    def batches(self, query: str, num_rows: int | None = None, params: Parameters = None) -> Batches:
        """A query's rows, in batches that are computed by all threads while they are asked for."""
        self.use_threads()
        return self.sql(query, params).to_arrow_reader(num_rows or BATCH_ROWS)

    def use_threads(self) -> None:
        """Let the next questions be computed by all threads that this process may use."""
        self.execute(f"SET threads = {num_threads()}" if is_limited() else "RESET threads")

    def mapped_batches(
        self, query: str, function: Callable[[pa.RecordBatch], Made], num_rows: int | None = None
    ) -> Iterator[Made]:
        """Results of a function of batches of a query's rows, by several threads beside the reading; one at least."""
        rows = self.batches(query, num_rows)
        is_empty = True
        with ThreadPoolExecutor(num_threads()) as pool:
            for made in mapped(pool, function, rows):
                is_empty = False
                yield made
        if is_empty:
            yield function(pa.RecordBatch.from_pylist([], rows.schema))

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Raise an error of ours in the place of one that the traces' files are the cause of."""
        try:
            with interruptible():
                yield
        except (duckdb.Error, pa.ArrowException, OSError) as error:
            if isinstance(error, (*NOT_OF_FILES, StorageError)):
                raise
            raise self._explain(error) from error

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


_open: WeakSet[duckdb.DuckDBPyConnection] = WeakSet()


@atexit.register
def _close_all() -> None:
    """Close what is open before the interpreter ends: DuckDB's threads read through Python, and abort the process then."""
    for connection in list(_open):
        connection.close()


class Result:
    """What a question gave."""

    def __init__(self, raw: Any, connection: Connection, choose_again: Callable[[], None] = _nothing):
        self._raw, self._connection, self._choose_again = raw, connection, choose_again

    @property
    def description(self) -> Any:
        return self._raw.description

    def fetchall(self) -> list[tuple[Any, ...]]:
        with self._connection.explained():
            self._choose_again()
            found: list[tuple[Any, ...]] = self._raw.fetchall()
        return found

    def fetchnumpy(self) -> dict[str, Any]:
        with self._connection.explained():
            self._choose_again()
            found: dict[str, Any] = self._raw.fetchnumpy()
        return found

    def to_arrow_table(self) -> pa.Table:
        with self._connection.explained():
            self._choose_again()
            return self._raw.to_arrow_table()

    def to_arrow_reader(self, batch_size: int) -> Batches:
        """Batches of rows as they are computed."""
        with self._connection.explained():
            self._choose_again()
            return Batches(self._raw.to_arrow_reader(batch_size), self._connection)


class Batches:
    """Batches of rows, each computed when it is asked for."""

    def __init__(self, raw: Any, connection: Connection):
        self._raw, self._connection = raw, connection
        self.schema: pa.Schema = raw.schema

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        with self._connection.explained():
            yield from self._raw
