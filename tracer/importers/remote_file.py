"""One file of a dump that lies on object storage, read by ranges: it looks like a path to whoever reads it."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import fsspec

from ...schemas.errors import ImportFailed
from ..store import first_line, too_large

AHEAD_BYTES = 8 << 20
"""Bytes that are asked for at once by who reads on."""
_BUFFER_BYTES = 1 << 20
MAX_LINE = 256 << 20
"""Bytes of a line: a sequence of a million tokens takes less."""
TIMES_AS_JSON = 16
"""Bytes in memory of a byte of JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    """One file on a file system that fsspec knows. What goes wrong on the way raises ImportFailed."""

    filesystem: fsspec.AbstractFileSystem
    path: str
    """As the file system names it."""
    url: str
    """As the user would name it."""

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        return PurePosixPath(self.path).name

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.path).suffix

    @property
    def parent(self) -> str:
        return self.url.rpartition("/")[0]

    def open(self, mode: str = "rb", *, ahead: int = AHEAD_BYTES) -> BinaryIO:
        """The file as a stream that asks for up to `ahead` bytes more than it is asked for, and keeps no more."""
        with _told(self.url):
            file = self.filesystem.open(self.path, mode, block_size=ahead, cache_type="readahead")
        return io.BufferedReader(_Stream(file, self.url), min(ahead, _BUFFER_BYTES))

    def read_bytes(self) -> bytes:
        """The whole file."""
        with _told(self.url):
            return bytes(self.filesystem.cat_file(self.path))


DumpFile = Path | RemoteFile
"""One file of a dump, here or on object storage."""


def opened(path: DumpFile) -> BinaryIO:
    """A file to be read from its beginning to its end, whose lines are long."""
    return path.open("rb") if isinstance(path, RemoteFile) else path.open("rb", buffering=_BUFFER_BYTES)


def whole_content(path: DumpFile, times: int = 2) -> bytes:
    """All that a file holds. Raises ImportFailed, also where memory has no room for `times` its bytes."""
    with _told(str(path)):
        size = int(path.filesystem.size(path.path) or 0) if isinstance(path, RemoteFile) else path.stat().st_size
    if (said := too_large(size, times)) is not None:
        raise ImportFailed(f"{path}: {said}; divide it, or import it on a larger machine")
    try:
        return path.read_bytes()
    except OSError as error:
        raise ImportFailed(f"{path}: cannot be read ({error.strerror or error})") from error


def lines_of(file: Any, where: object) -> Iterator[Any]:
    """The lines of a file, as bytes or as text. Raises ImportFailed for one without an end."""
    number = 0
    while line := file.readline(MAX_LINE + 1):
        number += 1
        if len(line) > MAX_LINE:
            raise ImportFailed(
                f"{where}, line {number}: has no end within {MAX_LINE:,} bytes; is it a file of lines, and whole?"
            )
        yield line


class _Stream(io.RawIOBase):
    """A file of fsspec, whose errors name it."""

    def __init__(self, file: Any, url: str):
        self._file, self._url = file, url

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with _told(self._url):
            found = self._file.read(len(buffer))
        buffer[: len(found)] = found
        return len(found)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


@contextmanager
def _told(url: str) -> Iterator[None]:
    """Name the file in an error of its file system, whose libraries have classes of their own for these."""
    try:
        yield
    except Exception as error:
        raise ImportFailed(f"{url}: cannot be read ({first_line(error)})") from error
