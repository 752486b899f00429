"""The files of a framework's dump, and the shape that every reader of one has."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec
import xxhash
from fsspec.implementations.local import LocalFileSystem

from ...schemas.checksums import SealedFile, sealed
from ...schemas.errors import ImportFailed
from ..store import file_system, first_line
from .fields import Fields
from .pickles import Budget
from .remote_file import DumpFile, RemoteFile, opened, whole_content


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpFolder:
    """The files at a path or a URL."""

    url: str
    root: Path
    """The folder; of files on object storage nothing is asked of it."""
    files: tuple[str, ...]
    """Paths below the root, those with numbers in the order of the numbers."""
    is_file: bool = False
    """Whether the path is that of the one file, which may be a link then."""
    filesystem: fsspec.AbstractFileSystem | None = None
    """None for files of this machine."""
    remote: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    """Of each file on object storage the path as the file system names it, and the bytes when it was listed."""

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> DumpFolder:
        """List the files below a folder, or take the one file. Raises ImportFailed and StorageError.

        No link that leads out of the folder is followed, and nothing but regular files is opened.
        """
        url = os.fspath(path)
        local = url
        if "://" in url:
            filesystem, local = file_system(url)
            if not isinstance(filesystem, LocalFileSystem):
                return cls._remote(url, filesystem, local.rstrip("/"))
        given = Path(os.path.abspath(os.path.expanduser(local)))
        if given.is_file():
            return cls(url=url, root=given.parent, files=(given.name,), is_file=True)
        if not given.is_dir():
            raise ImportFailed(f"{url}: nothing is there that can be read; name the folder that the framework wrote to")
        root, found = Path(os.path.realpath(given)), []
        for base, folders, names in os.walk(root):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            found += [os.path.relpath(os.path.join(base, name), root) for name in names if not name.startswith(".")]
        return cls(url=url, root=root, files=tuple(sorted(found, key=_in_order)))

    @classmethod
    def _remote(cls, url: str, filesystem: fsspec.AbstractFileSystem, root: str) -> DumpFolder:
        try:
            filesystem.invalidate_cache()
            listed: dict[str, dict[str, Any]] = filesystem.find(root, detail=True)
            sizes = {path: int((entry or filesystem.info(path))["size"] or 0) for path, entry in listed.items()}
        except FileNotFoundError:
            sizes = {}
        except Exception as error:  # every file system has errors of its own
            raise ImportFailed(f"{url}: cannot be listed ({first_line(error)})") from error
        is_file = list(sizes) == [root]
        base = root.rpartition("/")[0] if is_file else root
        found = {path[len(base) :].lstrip("/"): (path, size) for path, size in sizes.items()}
        remote = {name: each for name, each in found.items() if name and not re.search(r"(^|/)\.|/$", name)}
        if not remote:
            raise ImportFailed(f"{url}: nothing is there that can be read; name the folder that the framework wrote to")
        return cls(
            url=url,
            root=Path(base),
            files=tuple(sorted(remote, key=_in_order)),
            is_file=is_file,
            filesystem=filesystem,
            remote=remote,
        )

    def matching(self, pattern: str) -> Iterator[tuple[str, re.Match[str]]]:
        """The files whose path ends in what a pattern says."""
        wanted = re.compile(rf"(?:.*/)?{pattern}")
        for name in self.files:
            if found := wanted.fullmatch(name):
                yield name, found

    def path(self, name: str) -> DumpFile:
        """Where a file lies. Raises ImportFailed for a link out of the folder, and for what is no regular file."""
        if self.filesystem is not None:
            url = self.url if self.is_file else f"{self.url.rstrip('/')}/{name}"
            return RemoteFile(filesystem=self.filesystem, path=self.remote[name][0], url=url)
        path = self.root / name
        real = os.path.realpath(path)
        if not self.is_file and not real.startswith(f"{self.root}{os.sep}"):
            raise ImportFailed(
                f"{path}: is a link that leads out of the folder; it is not followed: import what it leads to"
            )
        try:
            if not stat.S_ISREG(os.stat(path).st_mode):
                raise ImportFailed(f"{path}: is no regular file, and is not read; remove it")
        except OSError as error:
            raise ImportFailed(f"{path}: cannot be read ({error.strerror or error})") from error
        return path

    def num_bytes(self, names: Sequence[str]) -> int:
        """Bytes of some files."""
        if self.filesystem is not None:
            return sum(self.remote[name][1] for name in names if name in self.remote)
        return sum(os.stat(self.root / name).st_size for name in names if (self.root / name).exists())

    def beside(self, name: str, other: str) -> str | None:
        """The path below the root of the file `other` in the folder of a file; None where there is none."""
        found = os.path.normpath(os.path.join(os.path.dirname(name), other))
        is_there = found in self.remote if self.filesystem is not None else (self.root / found).is_file()
        return found if is_there else None


def _in_order(name: str) -> list[Any]:
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name)]


_READ_BYTES = 1 << 20


def content_of(path: DumpFile, *, lines: int | None = None, num_bytes: int | None = None, start: int = 0) -> SealedFile:
    """What a file holds, or its first lines, or so many of its bytes."""
    digest, size = xxhash.xxh3_128(), 0
    with opened(path) as file:
        if start:
            file.seek(start)
        if lines is not None:
            for _ in range(lines):
                line = file.readline()
                digest.update(line)
                size += len(line)
        else:
            while block := file.read(_READ_BYTES if num_bytes is None else min(_READ_BYTES, num_bytes - size)):
                digest.update(block)
                size += len(block)
    return SealedFile(num_bytes=size, hash=digest.hexdigest(), num_rows=lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Files that are read together: those of one step, or one file with the rows of many."""

    files: tuple[str, ...]
    step: int | None = None
    """None where the rows say it themselves."""
    waits_for: str | None = None
    """Why it is not complete yet; None for one that is."""


@dataclass(slots=True, kw_only=True)
class Reading:
    """What a reader is told of the part that it reads."""

    folder: DumpFolder
    part: Part
    columns: Mapping[str, tuple[str, ...]]
    """Column of the trace -> names of the fields that it may be read from, the first that is there."""
    seen: set[str]
    """Names of fields that were read."""
    first_line: Mapping[str, int] = field(default_factory=dict)
    """File of lines -> the number of the first line that is new, from 1."""
    last_line: dict[str, int] = field(default_factory=dict)
    """File of lines -> the number of the last whole line; the reader sets it."""
    partial: bool = False
    """Whether what is incomplete is read as far as it is there."""
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    """Step -> values of the step to log; the reader sets them."""
    sources: dict[str, SealedFile] = field(default_factory=dict)
    """File that was read as a whole -> what it held."""

    def paths(self) -> list[DumpFile]:
        """The files of the part."""
        return [self.folder.path(name) for name in self.part.files]

    def contents(self) -> Iterator[tuple[DumpFile, bytes]]:
        """The files of the part, each with all that it holds. Raises ImportFailed."""
        for name, path in zip(self.part.files, self.paths(), strict=True):
            content = whole_content(path)
            self.sources[name] = sealed(content)
            yield path, content

    def fields(self, record: Mapping[Any, Any], where: str, budget: Budget) -> Fields:
        """A record's fields under the names of the trace's columns."""
        return Fields(record, self.columns, where, self.seen, budget)

    def budget(self) -> Budget:
        """What reading this part may take in memory."""
        return Budget(", ".join(self.part.files[:2]), self.folder.num_bytes(self.part.files))
