"""Every error and warning that tim-trace raises on purpose; anything else is a bug and keeps its traceback."""

import errno
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

_speaks_options = False
"""Whether errors are read by somebody who wrote a command."""


@contextmanager
def speaking_options() -> Iterator[None]:
    """Let errors, warnings and notes name options as the command line has them."""
    global _speaks_options
    before, _speaks_options = _speaks_options, True
    try:
        yield
    finally:
        _speaks_options = before


def speaks_options() -> bool:
    """Whether `speaking_options` holds: a process that works for this one is to speak the same way."""
    return _speaks_options


def option(name: str, value: object = True) -> str:
    """An option as the caller writes it: as a keyword in Python, as a flag on the command line.

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
    """Several options, as the caller writes them one after the other."""
    return (" " if _speaks_options else ", ").join(option(name, value) for name, value in values.items())


class TimTraceError(Exception):
    """A condition that the message explains: what, where, what was found, and the way out.

    >>> error = InvalidOption("got 'hour'; use run or step", option="by")
    >>> str(error), error.message, error.option
    ("by: got 'hour'; use run or step", "got 'hour'; use run or step", 'by')
    """

    exit_code = 2

    def __init__(self, *message: object, option: str | None = None):
        """`option` is the parameter whose value is at fault; None where it is none, or several."""
        super().__init__(*message)
        self.option = option

    @property
    def message(self) -> str:
        """What is wrong, without the option's name."""
        return super().__str__()

    def __str__(self) -> str:
        return self.message if self.option is None else f"{self.option}: {self.message}"


class TraceNotFound(TimTraceError, FileNotFoundError):
    """No trace lies at this path."""


class TraceExists(TimTraceError, FileExistsError):
    """Something lies where a trace should be written."""


class FileThere(TimTraceError, FileExistsError):
    """A file lies where a report or a figure should be written."""


class NewerTrace(TimTraceError, ValueError):
    """The trace has a format version that this build does not know."""


class DamagedTrace(TimTraceError, ValueError):
    """A file of the trace cannot be read."""


class StorageError(TimTraceError, OSError):
    """A file, a folder or a URL cannot be reached or written."""


class StorageStalled(StorageError, TimeoutError):
    """The file system of a trace did not answer in time."""


class InvalidRecord(TimTraceError, ValueError):
    """What was handed to the recorder contradicts itself or what was recorded before."""


class ImportFailed(TimTraceError, ValueError):
    """The file to import does not hold what the format asks for."""


class InvalidQuery(TimTraceError, ValueError):
    """The query is not valid, or asks for what a query may not do."""


class QueryFailed(TimTraceError, RuntimeError):
    """No answer could be had: DuckDB lacks memory or room on the disk, or the trace changes faster than it is read."""


class NothingToCompare(TimTraceError, ValueError):
    """The two passes share no token."""


class WeightsMissing(TimTraceError, LookupError):
    """The trace does not hold the weights that are asked for."""


class CannotReplay(TimTraceError, RuntimeError):
    """What is asked for cannot be replayed on this trace or this machine."""


class ClusterFailed(TimTraceError, RuntimeError):
    """A Ray cluster has no room for the work, or its actors die of it."""


class InvalidOption(TimTraceError, ValueError):
    """An option has a value that it cannot take."""


class WrongType(TimTraceError, TypeError):
    """An argument is of a type that cannot be taken."""


class NotInstalled(TimTraceError, ImportError):
    """A library that is asked for is not installed."""


_WAYS_OUT = {
    errno.ENOSPC: "; make room on its disk",
    errno.EFBIG: "; raise the limit of the size of files (ulimit -f)",
    errno.EMFILE: "; raise the limit of open files (ulimit -n)",
    errno.EACCES: "; check your access to it",
}


def of_system(error: OSError, where: str | None = None) -> StorageError:
    """What the operating system refused, as an error of ours; `where` is the file, where the error does not name it."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return StorageError("the working directory was removed; change to one that exists")
    what = where or error.filename or "the operating system refused"
    said = error.strerror or (str(error).strip().splitlines() or [type(error).__name__])[0]
    return StorageError(f"{what}: {said}{_WAYS_OUT.get(error.errno or 0, '')}")


class TimTraceWarning(UserWarning):
    """Something went another way than asked; the message says which."""


class DamageWarning(TimTraceWarning):
    """A part of the trace cannot be read or is missing: answers are from the rest."""


class ColumnsLeftOut(TimTraceWarning):
    """A table is wider than the terminal; the message names the columns that are not shown."""


class SampleWarning(TimTraceWarning):
    """A pass that was asked for has scores of a sample of the sequences alone."""


def tell_samples(sentences: Iterable[str]) -> None:
    """Warn of passes that are a sample, a sentence each, as the caller of who calls this."""
    for sentence in sentences:
        warnings.warn(sentence, SampleWarning, stacklevel=_depth())


def tell_damage(sentences: Iterable[str]) -> None:
    """Warn of what is damaged or missing, a sentence each, as the caller of who calls this."""
    for sentence in sentences:
        warnings.warn(sentence, DamageWarning, stacklevel=_depth())


def _depth() -> int:
    """Frames from the caller of this to the first one outside of this package, whose line a warning names."""
    package, depth = __name__.partition(".")[0], 1
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == package:
        frame, depth = frame.f_back, depth + 1
    return depth
