"""Errors and warnings that tim-trace raises deliberately; any other exception is a bug and keeps its traceback."""

import errno
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

_speaks_options = False
"""True while error messages show options as command-line flags rather than Python keywords."""


@contextmanager
def speaking_options() -> Iterator[None]:
    """Within this context, show options in messages as command-line flags."""
    global _speaks_options
    before, _speaks_options = _speaks_options, True
    try:
        yield
    finally:
        _speaks_options = before


def speaks_options() -> bool:
    """Return True inside `speaking_options`. Worker processes are started with the same value."""
    return _speaks_options


def option(name: str, value: object = True) -> str:
    """Return an option as the caller would write it: a keyword in Python, a flag on the command line.

    >>> option("force"), option("by", "step")
    ('force=True', "by='step'")
    >>> with speaking_options():
    ...     option("force"), option("by", "step"), option("use_rs", False)
    ('--force', '--by step', '--no-use-rs')
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not _speaks_options:
        return f"{name}={value!r}"
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag} {value}"


def options(values: Mapping[str, object]) -> str:
    return (" " if _speaks_options else ", ").join(option(name, value) for name, value in values.items())


class TimTraceError(Exception):
    """Base class of all errors; the message says what is wrong, where, and how to fix it.

    >>> error = InvalidOption("got 'hour'; use run or step", option="by")
    >>> str(error), error.message, error.option
    ("by: got 'hour'; use run or step", "got 'hour'; use run or step", 'by')
    """

    exit_code = 2

    def __init__(self, *message: object, option: str | None = None):
        """`option` is the name of the invalid parameter; None if no single parameter is at fault."""
        super().__init__(*message)
        self.option = option

    @property
    def message(self) -> str:
        """The message without the option's name."""
        return super().__str__()

    def __str__(self) -> str:
        return self.message if self.option is None else f"{self.option}: {self.message}"


class TraceNotFound(TimTraceError, FileNotFoundError):
    """No trace exists at this path."""


class TraceExists(TimTraceError, FileExistsError):
    """The output path of a trace already exists."""


class FileThere(TimTraceError, FileExistsError):
    """The output file of a report or figure already exists."""


class NewerTrace(TimTraceError, ValueError):
    """The trace has a newer format version than this build supports."""


class DamagedTrace(TimTraceError, ValueError):
    """A file of the trace cannot be read."""


class StorageError(TimTraceError, OSError):
    """A file, a folder or a URL cannot be reached or written."""


class StorageStalled(StorageError, TimeoutError):
    """The file system of a trace did not answer in time."""


class InvalidRecord(TimTraceError, ValueError):
    """A recorded value is invalid, or contradicts earlier records."""


class ImportFailed(TimTraceError, ValueError):
    """The file to import does not match the format."""


class InvalidQuery(TimTraceError, ValueError):
    """The query is invalid or not permitted."""


class QueryFailed(TimTraceError, RuntimeError):
    """DuckDB ran out of memory or disk space, or the trace changes faster than it can be read."""


class NothingToCompare(TimTraceError, ValueError):
    """The two passes have no token in common."""


class WeightsMissing(TimTraceError, LookupError):
    """The trace does not contain the requested weights."""


class CannotReplay(TimTraceError, RuntimeError):
    """The replay is impossible with this trace or on this machine."""


class ClusterFailed(TimTraceError, RuntimeError):
    """A Ray cluster lacks resources for the work, or its actors died."""


class InvalidOption(TimTraceError, ValueError):
    """An option has an invalid value."""


class WrongType(TimTraceError, TypeError):
    """An argument has the wrong type."""


class NotInstalled(TimTraceError, ImportError):
    """A required library is not installed."""


_WAYS_OUT = {
    errno.ENOSPC: "; free disk space there",
    errno.EFBIG: "; raise the file size limit (ulimit -f)",
    errno.EMFILE: "; raise the open file limit (ulimit -n)",
    errno.EACCES: "; check your access to it",
}


def of_system(error: OSError, where: str | None = None) -> StorageError:
    """Convert an OSError to a StorageError. If the error does not name a file, `where` is named instead."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return StorageError("the working directory was removed; change to one that exists")
    what = where or error.filename or "the operating system refused"
    said = error.strerror or (str(error).strip().splitlines() or [type(error).__name__])[0]
    return StorageError(f"{what}: {said}{_WAYS_OUT.get(error.errno or 0, '')}")


class TimTraceWarning(UserWarning):
    """The request was not carried out exactly as asked; the message says how."""


class DamageWarning(TimTraceWarning):
    """Part of the trace is damaged or missing; results are based on the remaining data."""


class ColumnsLeftOut(TimTraceWarning):
    """A table is wider than the terminal; the message lists the hidden columns."""


class SampleWarning(TimTraceWarning):
    """A requested pass covers only a sample of the sequences."""


def tell_samples(sentences: Iterable[str]) -> None:
    """Issue a SampleWarning per sentence, attributed to the first caller outside this package."""
    for sentence in sentences:
        warnings.warn(sentence, SampleWarning, stacklevel=_depth())


def tell_damage(sentences: Iterable[str]) -> None:
    for sentence in sentences:
        warnings.warn(sentence, DamageWarning, stacklevel=_depth())


def _depth() -> int:
    """Return the stacklevel of the first frame outside this package, counted from the caller."""
    package, depth = __name__.partition(".")[0], 1
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == package:
        frame, depth = frame.f_back, depth + 1
    return depth
