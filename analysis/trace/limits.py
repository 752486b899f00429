"""Limit how long a query runs and how much memory it takes."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

import duckdb

from ...schemas.errors import InvalidOption, InvalidQuery, option
from ...schemas.size import parse_size

_STACKS = 64 << 20
"""Memory added to the limit for thread stacks (bytes)."""
_INTERRUPT_EVERY_S = 0.1


def set_memory(connection: duckdb.DuckDBPyConnection, memory: str) -> None:
    """Limit the size of DuckDB's buffers, and keep DuckDB from writing temporary files."""
    num_bytes = parse_size(memory, option="memory")
    if num_bytes < 10**6:
        raise InvalidOption(f"got {memory!r}; use at least 1MB", option="memory")
    connection.execute(f"SET memory_limit = '{num_bytes}B'; SET temp_directory = ''")


def check_timeout(timeout: float) -> None:
    if not timeout > 0:
        raise InvalidOption(f"got {timeout}; use a number of seconds above 0", option="timeout")


@contextmanager
def limited(
    connection: duckdb.DuckDBPyConnection, timeout: float | None = None, memory: str | None = None
) -> Iterator[None]:
    """Raise InvalidQuery if the block runs longer than `timeout` seconds or needs more memory than `memory`.

    DuckDB's own limit covers its buffers, but not strings and lists under construction. On Linux, the
    memory of the whole process is therefore limited too, until the block ends.
    """
    ended, expired = Event(), Event()

    def interrupt() -> None:
        while not ended.wait(_INTERRUPT_EVERY_S if expired.is_set() else timeout):
            expired.set()
            connection.interrupt()

    if timeout is not None:
        check_timeout(timeout)
        Thread(target=interrupt, name="timeout", daemon=True).start()
    try:
        with _process_limit(None if memory is None else parse_size(memory, option="memory")):
            yield
    except Exception as error:
        if timeout is not None and expired.is_set():
            raise InvalidQuery(too_long(timeout)) from error
        if memory is not None and _is_out_of_memory(error):
            more = option("memory", f"{2 * parse_size(memory) / 1e6:.4g}MB")
            raise InvalidQuery(
                f"sql: the query needs more memory than {memory}; select fewer steps or columns, or set {more}"
            ) from error
        raise
    finally:
        ended.set()


def too_long(timeout: float) -> str:
    more = option("timeout", 2 * timeout)
    return f"sql: the query took longer than {timeout:g} s; select fewer steps or rows, or set {more}"


@contextmanager
def _process_limit(num_bytes: int | None) -> Iterator[None]:
    used = None if num_bytes is None else _data_bytes()
    if num_bytes is None or used is None:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = min([used + num_bytes + _STACKS, *(limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY)])
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _data_bytes() -> int | None:
    """Return the number of bytes that count toward RLIMIT_DATA, or None if the system does not report it."""
    try:
        with open("/proc/self/status", encoding="ascii") as lines:
            return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData:"))
    except (OSError, StopIteration):
        return None


def _is_out_of_memory(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, (MemoryError, duckdb.OutOfMemoryException)):
            return True
        if any(words in str(error) for words in ("MemoryError", "can't start new thread")):  # of Python functions
            return True
        error = error.__cause__ or error.__context__
    return False
