"""index/: what an open has to read of a trace's many files, in one file: footers of tables, writers' states and contracts.

An index is a copy, and nothing is believed because it stands there. A footer serves where its checksum is the one that its
file's writer gave, a contract where its hash is its name, a writer's state where the file system tells the checksum of the file
itself. What the index lacks, and what has changed since, is read where it lies; so an index may be old, and may be removed.
"""

from __future__ import annotations

import gzip
import hashlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from ..schemas.checksums import short_hash, whole_hash
from ..schemas.errors import DamagedTrace
from ..schemas.layout import INDEX, PASSES, SUMS, TABLES, WRITERS
from .parquet_file import read_tail
from .store import Store
from .whole_file import write_part

MAX_BYTES = 64 << 20
"""Of all that an index holds. A trace of more files has larger ones to be read: see compaction."""

_UNPACKED_BYTES = 2 * MAX_BYTES
"""Of an index as JSON, in which bytes are base64; one that has more is passed over."""
_GZIP = 31
"""What tells zlib that it reads gzip."""

_Contents = dict[str, tuple[int, bytes]]


@dataclass(slots=True)
class Index:
    """Ends of files, and whole small ones, by their paths in the trace."""

    contents: _Contents = field(default_factory=dict)
    """Path -> bytes of the file, and its content: of a table its footer, of any other file all of it."""

    def footer(self, relative: str, num_bytes: int, checksum: str | None) -> bytes | None:
        """The footer of a file of so many bytes, if it has this checksum."""
        size, content = self.contents.get(relative, (0, b""))
        return content if size == num_bytes and short_hash(content) == checksum else None

    def document(self, relative: str, md5: str | None) -> bytes | None:
        """A small file, if this is the MD5 of what lies there now."""
        _, content = self.contents.get(relative, (0, b""))
        return content if content and hashlib.md5(content, usedforsecurity=False).hexdigest() == md5 else None

    def named(self, relative: str) -> bytes | None:
        """A small file whose name is made of its content, which the caller compares."""
        return self.contents.get(relative, (0, None))[1]


def read_index(store: Store) -> Index:
    """Every index of a trace as one. One that is not what its name says is passed over."""
    index = Index()
    for name, size in store.files(INDEX).items():
        index.contents |= _contents_of(store, name, size) or {}
    return index


def passed_over(store: Store) -> list[str]:
    """Paths of the indexes that are not what their names say, which no answer comes from."""
    return [f"{INDEX}/{name}" for name, size in store.files(INDEX).items() if _contents_of(store, name, size) is None]


def _contents_of(store: Store, name: str, size: int) -> _Contents | None:
    if size > MAX_BYTES:
        return None
    try:
        content = store.read_bytes(f"{INDEX}/{name}")
        if f"{whole_hash(content)}.json.gz" != name:
            return None
        unpacking = zlib.decompressobj(_GZIP)
        unpacked = unpacking.decompress(content, _UNPACKED_BYTES)
        return msgspec.json.decode(unpacked, type=_Contents) if unpacking.eof else None
    except (OSError, DamagedTrace, zlib.error, msgspec.MsgspecError):
        return None


def write_index(folder: Path) -> None:
    """Write the index of a trace anew, and remove the one before."""
    store = Store(folder)
    before = store.files(INDEX)
    contents: _Contents = {}
    left = MAX_BYTES
    for path, size, content in _contents(store):
        if (left := left - len(content)) < 0:
            break
        contents[path] = (size, content)
    packed = gzip.compress(msgspec.json.encode(contents), compresslevel=1, mtime=0)
    name = f"{whole_hash(packed)}.json.gz"
    write_part(folder, f"{INDEX}/{name}", packed)
    for old in before:
        if old != name:
            (folder / INDEX / old).unlink(missing_ok=True)


def _contents(store: Store) -> Iterator[tuple[str, int, bytes]]:
    """Path, bytes and what an index keeps, of every file that an open reads; the most useful first."""
    for name, size in store.files(WRITERS).items():
        yield f"{WRITERS}/{name}", size, store.read_json(f"{WRITERS}/{name}")
    for name, size in store.walk(PASSES).items():
        yield f"{PASSES}/{name}", size, store.read_json(f"{PASSES}/{name}")
    for table in (*TABLES, SUMS):
        for name, size in store.files(table).items():
            try:
                yield f"{table}/{name}", size, read_tail(store, f"{table}/{name}", size)
            except DamagedTrace:
                continue
