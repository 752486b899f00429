from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO, TextIO

from ..schemas.errors import TimTraceError

_STDOUT, _STDERR = 1, 2
_MOST_LINES = 40


@contextmanager
def library_output_held_back() -> Iterator[TextIO]:
    """Capture stdout and stderr, including output from C code. Yield a stream to the real stderr. If the block raises
    an exception, the last lines are printed, since they often explain the error."""
    with tempfile.TemporaryFile() as kept:
        try:
            with _redirected(kept) as stream:
                yield stream
        except Exception as error:
            kept.seek(0)
            lines = kept.read().decode(errors="backslashreplace").splitlines()[-_MOST_LINES:]
            if lines and (not isinstance(error, TimTraceError) or error.__cause__ is not None):
                print("tim-trace: library output before the error:", *lines, sep="\n  ", file=sys.stderr)
            raise


@contextmanager
def _redirected(kept: BinaryIO) -> Iterator[TextIO]:
    _flush()
    saved = {number: os.dup(number) for number in (_STDOUT, _STDERR)}
    stream = sys.stderr
    with suppress(OSError, ValueError):  # an in-memory stream has no file descriptor
        if stream.fileno() == _STDERR:
            stream = os.fdopen(os.dup(_STDERR), "w", encoding=stream.encoding, errors=stream.errors, buffering=1)
    for number in saved:
        os.dup2(kept.fileno(), number)
    try:
        yield stream
    finally:
        _flush()
        for number, copy in saved.items():
            os.dup2(copy, number)
            os.close(copy)
        if stream is not sys.stderr:
            stream.close()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
