"""Hiding what libraries print while they build and run models, unless something fails."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, TextIO

from ..schemas.errors import TimTraceError

_STDOUT, _STDERR = 1, 2
_MOST_LINES = 40
"""Number of last lines shown with an error."""


@contextmanager
def library_output_held_back() -> Iterator[TextIO]:
    """Hold back stdout and stderr, including output of C code; yield a stream to the real stderr.

    If a library raises, the output is written to stderr, as it often contains the reason.
    """
    with tempfile.TemporaryFile() as kept:
        stream, saved = _replaced(kept)
        try:
            yield stream
        except Exception as error:
            _restored(saved, stream)
            if not isinstance(error, TimTraceError) or error.__cause__ is not None:
                _show(kept)
            raise
        finally:
            _restored(saved, stream)


def _replaced(kept: BinaryIO) -> tuple[TextIO, dict[int, int]]:
    """Redirect stdout and stderr to the file; return the real stderr, and file descriptor -> its copy."""
    _flush()
    saved = {number: os.dup(number) for number in (_STDOUT, _STDERR)}
    stream = sys.stderr
    if _is_descriptor(stream, _STDERR):
        stream = os.fdopen(os.dup(_STDERR), "w", encoding=sys.stderr.encoding, errors=sys.stderr.errors, buffering=1)
    for number in saved:
        os.dup2(kept.fileno(), number)
    return stream, saved


def _restored(saved: dict[int, int], stream: TextIO) -> None:
    """Restore stdout and stderr; later calls do nothing."""
    if saved:
        _flush()
        while saved:
            number, copy = saved.popitem()
            os.dup2(copy, number)
            os.close(copy)
        if stream is not sys.stderr:
            stream.close()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def _is_descriptor(stream: TextIO, number: int) -> bool:
    try:
        return stream.fileno() == number
    except (OSError, ValueError):
        return False


def _show(kept: BinaryIO) -> None:
    kept.seek(0)
    lines = kept.read().decode(errors="backslashreplace").splitlines()[-_MOST_LINES:]
    if lines:
        print("tim-trace: libraries printed before the error:", *lines, sep="\n  ", file=sys.stderr)
