"""Read a dump's files on object storage by byte ranges, with the part of pathlib.Path's interface that readers use."""

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
"""Read-ahead for sequential reads, bytes."""
_BUFFER_BYTES = 1 << 20
MAX_LINE = 256 << 20
"""Maximum length of a line, bytes. A line with a sequence of one million tokens is shorter."""
TIMES_AS_JSON = 16
"""Upper estimate of the memory taken by parsed JSON, in bytes per byte of JSON text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    """A file on an fsspec file system. Read errors raise ImportFailed."""

    filesystem: fsspec.AbstractFileSystem
    path: str
    """Path of the file on the fsspec file system."""
    url: str
    """URL of the file, shown in messages."""

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
        """Open the file as a stream with a read-ahead buffer of up to `ahead` bytes."""
        with _told(self.url):
            file = self.filesystem.open(self.path, mode, block_size=ahead, cache_type="readahead")
        return io.BufferedReader(_Stream(file, self.url), min(ahead, _BUFFER_BYTES))

    def read_bytes(self) -> bytes:
        with _told(self.url):
            return bytes(self.filesystem.cat_file(self.path))


DumpFile = Path | RemoteFile
"""A file of a dump, local or on object storage."""


def opened(path: DumpFile) -> BinaryIO:
    """Open a file for sequential reading, with a buffer suited to long lines."""
    return path.open("rb") if isinstance(path, RemoteFile) else path.open("rb", buffering=_BUFFER_BYTES)


def whole_content(path: DumpFile, times: int = 2) -> bytes:
    """Return a file's content.

    Raises ImportFailed if the file cannot be read, or if `times` the file's size does not fit in memory.
    """
    with _told(str(path)):
        size = int(path.filesystem.size(path.path) or 0) if isinstance(path, RemoteFile) else path.stat().st_size
    if (said := too_large(size, times)) is not None:
        raise ImportFailed(f"{path}: {said}; split it, or import it on a larger machine")
    try:
        return path.read_bytes()
    except OSError as error:
        raise ImportFailed(f"{path}: cannot be read ({error.strerror or error})") from error


def lines_of(file: Any, where: object) -> Iterator[Any]:
    """Yield the lines of a file, as bytes or text. Raises ImportFailed for a line longer than MAX_LINE."""
    number = 0
    while line := file.readline(MAX_LINE + 1):
        number += 1
        if len(line) > MAX_LINE:
            raise ImportFailed(
                f"{where}, line {number}: does not end within {MAX_LINE:,} bytes; is this a complete file of lines?"
            )
        yield line


class _Stream(io.RawIOBase):
    """An fsspec file whose errors name its URL."""

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
    """Convert any error from the file system's library to an ImportFailed that names the file."""
    try:
        yield
    except Exception as error:
        raise ImportFailed(f"{url}: cannot be read ({first_line(error)})") from error
