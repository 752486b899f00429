"""Present a range of lines from a file as a file in which the lines keep their original line numbers."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from fsspec.implementations.local import LocalFileSystem

from .dump import DumpFolder
from .remote_file import MAX_LINE, RemoteFile, opened

_BLOCK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """A range of lines in a file."""

    first: int
    """Number of the first line, from 1."""
    start: int
    """Byte offset of the first line."""
    end: int
    """Byte offset of the end of the last line."""

    @property
    def num_bytes(self) -> int:
        return self.end - self.start


def cut_lines(folder: DumpFolder, name: str, first: int, most: int) -> Iterator[Lines]:
    """Divide a file's lines, starting at line `first`, into ranges of about `most` bytes."""
    number, start = 1, 0
    with opened(folder.path(name)) as file:
        while number < first and (line := file.readline()):
            number, start = number + 1, start + len(line)
        end, count = start, 0
        while block := file.read(min(most, _BLOCK_BYTES)):
            block += file.readline(MAX_LINE)
            end, count = end + len(block), count + block.count(b"\n")
            if end - start >= most:
                yield Lines(first=number, start=start, end=end)
                number, start, count = number + count, end, 0
        if end > start:
            yield Lines(first=number, start=start, end=end)


def folder_of_lines(folder: DumpFolder, name: str, lines: Lines) -> DumpFolder:
    """Return a folder whose only file holds the given lines, under their original line numbers."""
    path = folder.path(name)
    system, inside = (path.filesystem, path.path) if isinstance(path, RemoteFile) else (LocalFileSystem(), str(path))
    return _FolderOfLines(
        url=folder.url, root=folder.root, files=folder.files, is_file=folder.is_file, filesystem=folder.filesystem,
        remote=folder.remote, lines=_FileOfLines(filesystem=system, path=inside, url=str(path), lines=lines),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _FileOfLines(RemoteFile):
    """A file with a range of lines, preceded by one empty line per earlier line to preserve the line numbers."""

    lines: Lines

    def open(self, mode: str = "rb", *, ahead: int = _BLOCK_BYTES) -> BinaryIO:
        file = RemoteFile.open(self, mode, ahead=ahead)
        return io.BufferedReader(_LinesStream(file, self.lines), _BLOCK_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class _FolderOfLines(DumpFolder):
    """A folder whose only file holds a range of lines from another file."""

    lines: _FileOfLines

    def path(self, name: str) -> RemoteFile:
        return self.lines


class _LinesStream(io.RawIOBase):
    """A stream with one line end per earlier line, followed by the bytes of the line range."""

    def __init__(self, file: BinaryIO, lines: Lines):
        self._file, self._before, self._left = file, lines.first - 1, lines.end - lines.start
        file.seek(lines.start)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self._before:
            count = min(self._before, len(buffer))
            buffer[:count] = b"\n" * count
            self._before -= count
            return count
        content = self._file.read(min(self._left, len(buffer)))
        buffer[: len(content)] = content
        self._left -= len(content)
        return len(content)

    def close(self) -> None:
        self._file.close()
        super().close()
