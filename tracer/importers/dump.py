"""Access to the files in a framework's dump, and the interface between an import and the reader for a format."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from ...schemas.checksums import SealedFile, sealed
from ...schemas.errors import ImportFailed
from .fields import Fields
from .local_file import opened, whole_content
from .pickles import Budget


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpFolder:
    """The files of a dump."""

    url: str
    """Path as given by the user."""
    root: Path
    files: tuple[str, ...]
    """Paths of the files relative to the root, in natural order: step_2 before step_10."""
    is_file: bool = False
    """True if the given path is a single file, which may be a symlink."""

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> DumpFolder:
        """List the files below a folder, or take a single file. Raises ImportFailed.

        Links that lead out of the folder are not followed, and only regular files are opened.
        """
        url = os.fspath(path)
        if "://" in url:
            raise ImportFailed(
                f"{url}: only the format parquet is read from a URL; copy the folder to this machine first"
            )
        given = Path(os.path.abspath(os.path.expanduser(url)))
        if given.is_file():
            return cls(url=url, root=given.parent, files=(given.name,), is_file=True)
        if not given.is_dir():
            raise ImportFailed(f"{url}: not found; give the folder that the framework wrote to")
        root, found = Path(os.path.realpath(given)), []
        for base, folders, names in os.walk(root):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            found += [os.path.relpath(os.path.join(base, name), root) for name in names if not name.startswith(".")]
        return cls(url=url, root=root, files=tuple(sorted(found, key=_in_order)))

    def matching(self, pattern: str) -> Iterator[tuple[str, re.Match[str]]]:
        """Yield each file whose path ends in a match for `pattern`, together with the match."""
        wanted = re.compile(rf"(?:.*/)?{pattern}")
        for name in self.files:
            if found := wanted.fullmatch(name):
                yield name, found

    def path(self, name: str) -> Path:
        """Return a file's location.

        Raises ImportFailed if it is a link that leads out of the folder or is not a regular file.
        """
        path = self.root / name
        real = os.path.realpath(path)
        if not self.is_file and not real.startswith(f"{self.root}{os.sep}"):
            raise ImportFailed(f"{path}: is a link out of the folder, which is not followed; import its target instead")
        try:
            if not stat.S_ISREG(os.stat(path).st_mode):
                raise ImportFailed(f"{path}: is not a regular file; remove it")
        except OSError as error:
            raise ImportFailed(f"{path}: cannot be read ({error.strerror or error})") from error
        return path

    def num_bytes(self, names: Sequence[str]) -> int:
        """Return the total size of the named files, bytes."""
        return sum(os.stat(self.root / name).st_size for name in names if (self.root / name).exists())

    def beside(self, name: str, other: str) -> str | None:
        """Return the path of the file `other` in the same folder as `name`, relative to the root.

        Returns None if there is no such file.
        """
        found = os.path.normpath(os.path.join(os.path.dirname(name), other))
        return found if (self.root / found).is_file() else None


def _in_order(name: str) -> list[Any]:
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name)]


_READ_BYTES = 1 << 20


def content_of(path: Path, *, lines: int | None = None, num_bytes: int | None = None) -> SealedFile:
    """Return the size and hash of a whole file, of its first `lines` lines, or of its first `num_bytes` bytes."""
    digest, size = xxhash.xxh3_128(), 0
    with opened(path) as file:
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
    """Files that are read together: either all files from one step, or one file with rows from several steps."""

    files: tuple[str, ...]
    step: int | None = None
    """Step of all rows in the files; None if each row states its own step."""
    waits_for: str | None = None
    """Reason why the part is incomplete; None if it is complete."""


@dataclass(slots=True, kw_only=True)
class Reading:
    """Input and output of the reader for one part of a dump."""

    folder: DumpFolder
    part: Part
    columns: Mapping[str, tuple[str, ...]]
    """Column in the trace -> candidate fields in the file; the first field that exists is read."""
    seen: set[str]
    """Names of the fields that were read."""
    first_line: Mapping[str, int] = field(default_factory=dict)
    """JSON Lines file -> number of the first line not yet imported, from 1."""
    last_line: dict[str, int] = field(default_factory=dict)
    """JSON Lines file -> number of the last complete line; set by the reader."""
    partial: bool = False
    """True to read the available data from incomplete files."""
    sources: dict[str, SealedFile] = field(default_factory=dict)
    """File that was read completely -> size and hash of the file."""

    def paths(self) -> list[Path]:
        return [self.folder.path(name) for name in self.part.files]

    def contents(self) -> Iterator[tuple[Path, bytes]]:
        """Yield each file of the part with its content. Raises ImportFailed."""
        for name, path in zip(self.part.files, self.paths(), strict=True):
            content = whole_content(path)
            self.sources[name] = sealed(content)
            yield path, content

    def fields(self, record: Mapping[Any, Any], where: str, budget: Budget) -> Fields:
        """Return a record's fields, accessible by the trace's column names."""
        return Fields(record, self.columns, where, self.seen, budget)

    def budget(self) -> Budget:
        """Return the memory budget for reading this part."""
        return Budget(", ".join(self.part.files[:2]), self.folder.num_bytes(self.part.files))
