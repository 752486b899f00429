"""Errors and warnings that tim-trace raises deliberately. Any other exception is a bug and keeps its traceback."""

import errno
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

_speaks_options = False


@contextmanager
def speaking_options() -> Iterator[None]:
    """Show options in messages as command-line flags instead of Python keywords."""
    global _speaks_options
    before, _speaks_options = _speaks_options, True
    try:
        yield
    finally:
        _speaks_options = before


def speaks_options() -> bool:
    return _speaks_options


def option(name: str, value: object = True) -> str:
    """Format an option the way the caller would write it (Python keyword or command-line flag).

    >>> option("force"), option("by", "step")
    ('force=True', "by='step'")
    >>> with speaking_options():
    ...     option("force"), option("by", "step"), option("keep", False)
    ('--force', '--by step', '--no-keep')
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
    """Base class for all errors. The message says what is wrong, where, and how to fix it.

    >>> error = InvalidOption("got 'hour'; use run or step", option="by")
    >>> str(error), error.message, error.option
    ("by: got 'hour'; use run or step", "got 'hour'; use run or step", 'by')
    """

    exit_code = 2

    def __init__(self, *message: object, option: str | None = None):
        super().__init__(*message)
        self.option = option

    @property
    def message(self) -> str:
        return super().__str__()

    def __str__(self) -> str:
        return self.message if self.option is None else f"{self.option}: {self.message}"


class TraceNotFound(TimTraceError, FileNotFoundError):
    """No trace exists at this path."""


class TraceExists(TimTraceError, FileExistsError):
    """A trace already exists at the output path."""


class FileThere(TimTraceError, FileExistsError):
    """The output file for a report or figure already exists."""


class NewerTrace(TimTraceError, ValueError):
    """The trace's format version is newer than this build supports."""


class DamagedTrace(TimTraceError, ValueError):
    """A trace file is damaged or cannot be read."""


class StorageError(TimTraceError, OSError):
    """A file, folder or URL cannot be reached or written."""


class StorageStalled(StorageError, TimeoutError):
    """The trace's file system did not respond in time."""


class InvalidRecord(TimTraceError, ValueError):
    """A recorded value is invalid or contradicts earlier records."""


class ImportFailed(TimTraceError, ValueError):
    """The file to import does not have the expected format."""


class InvalidQuery(TimTraceError, ValueError):
    """The query is invalid or not permitted."""


class QueryFailed(TimTraceError, RuntimeError):
    """DuckDB ran out of memory or disk space, or the trace is changing faster than it can be read."""


class NothingToCompare(TimTraceError, ValueError):
    """The two passes have no token in common."""


class WeightsMissing(TimTraceError, LookupError):
    """The trace does not contain the requested weights."""


class CannotReplay(TimTraceError, RuntimeError):
    """This trace cannot be replayed, at least not on this machine."""


class ClusterFailed(TimTraceError, RuntimeError):
    """A Ray cluster has too few resources, or its actors died."""


class InvalidOption(TimTraceError, ValueError):
    """An option has an invalid value."""


class WrongType(TimTraceError, TypeError):
    """An argument has the wrong type."""


class NotInstalled(TimTraceError, ImportError):
    """A required library is not installed."""


EXTRAS = {
    "mcp": "mcp", "peft": "lora", "ray": "ray", "s3fs": "s3", "tensorboard": "tensorboard", "torch": "replay",
    "transformers": "replay", "wandb": "wandb",
}  # fmt: skip
"""Maps each optional library to the extra of tim-trace that installs it."""


_WAYS_OUT = {
    errno.ENOSPC: ". Free disk space there",
    errno.EFBIG: ". Raise the file size limit (ulimit -f)",
    errno.EMFILE: ". Raise the open file limit (ulimit -n)",
    errno.EACCES: ". Check its permissions",
}


def of_system(error: OSError, where: str | None = None) -> StorageError:
    """Convert an OSError to a StorageError. `where` replaces the file name in the message."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return StorageError("the working directory was removed. Change to one that exists")
    what = where or error.filename or "the operating system refused"
    said = error.strerror or (str(error).strip().splitlines() or [type(error).__name__])[0]
    return StorageError(f"{what}: {said}{_WAYS_OUT.get(error.errno or 0, '')}")


class TimTraceWarning(UserWarning):
    """The request was not carried out exactly as asked. The message explains the difference."""


class DamageWarning(TimTraceWarning):
    """Parts of the trace are damaged or missing, so results are based on the rest."""


class ColumnsLeftOut(TimTraceWarning):
    """A table is wider than the terminal. The message lists the hidden columns."""


class SampleWarning(TimTraceWarning):
    """A requested pass covers only a sample of the sequences."""


def warn(sentence: str, category: type[TimTraceWarning] = TimTraceWarning) -> None:
    """Issue a warning that points to the caller's line, outside this package."""
    package, depth = __name__.partition(".")[0], 1
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == package:
        frame, depth = frame.f_back, depth + 1
    warnings.warn(sentence, category, stacklevel=depth)


def tell_samples(sentences: Iterable[str]) -> None:
    for sentence in sentences:
        warn(sentence, SampleWarning)


def tell_damage(sentences: Iterable[str]) -> None:
    for sentence in sentences:
        warn(sentence, DamageWarning)
