"""Read files of a dump, whole or line by line, with bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from ...schemas.errors import ImportFailed
from ..store import first_line, too_large

_BUFFER_BYTES = 1 << 20
MAX_LINE = 256 << 20
"""Maximum length of a line, bytes. A line with a sequence of one million tokens is shorter."""
TIMES_AS_JSON = 16
"""Upper estimate of the memory taken by parsed JSON, in bytes per byte of JSON text."""


def opened(path: Path) -> BinaryIO:
    """Open a file for sequential reading, with a buffer suited to long lines."""
    return path.open("rb", buffering=_BUFFER_BYTES)


def whole_content(path: Path, times: int = 2) -> bytes:
    """Return a file's content.

    Raises ImportFailed if the file cannot be read, or if `times` the file's size does not fit in memory.
    """
    try:
        if (said := too_large(path.stat().st_size, times)) is not None:
            raise ImportFailed(f"{path}: {said}; split it, or import it on a larger machine")
        return path.read_bytes()
    except OSError as error:
        raise ImportFailed(f"{path}: cannot be read ({error.strerror or first_line(error)})") from error


def lines_of(file: Any, where: object) -> Iterator[Any]:
    """Yield the lines of a file, as bytes or text. Raises ImportFailed for a line longer than MAX_LINE."""
    number = 0
    while line := file.readline(MAX_LINE + 1):
        number += 1
        if len(line) > MAX_LINE:
            raise ImportFailed(
                f"{where}, line {number}: is longer than {MAX_LINE:,} bytes; is this a complete JSON Lines file?"
            )
        yield line
