"""A trace's Parquet files, verified on read, and the file system that serves them to DuckDB and Arrow.

A file's metadata holds its path and a checksum for each block before the footer. The writer's state holds the footer's
checksum.
"""

from __future__ import annotations

import base64
import io
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec import AbstractFileSystem

from ..schemas.checksums import BLOCK_BYTES, BLOCK_SIZES, BlockDigests, SealedFile, short_hash
from ..schemas.errors import DamagedTrace, QueryFailed, StorageError
from .store import Store, damaged, first_line, unreadable
from .verified_file import FileChecksums, FileCursor, VerifiedFile, unreadable_checksums

BLOCKS = b"tim-trace blocks"
"""Metadata key for the blocks' 8-byte XXH3-64 checksums (base64)."""
BLOCK_SIZE = b"tim-trace block bytes"
"""Metadata key for the block size in bytes (256 KiB by default)."""
IDENTITY = b"tim-trace file"
"""Metadata key for the path where the file was written."""

MAX_FOOTER_BYTES = 64 << 20
_TAIL_BYTES = 64 << 10
MAGIC = b"PAR1"
_FREE_VALUES, _VALUES_A_BYTE = 1 << 24, 16
"""A footer may claim at most _FREE_VALUES values, plus _VALUES_A_BYTE for each byte in the file."""


def write_checked(
    path: Path, identity: str, schema: pa.Schema, parts: Iterable[pa.Table], *, block_bytes: int = BLOCK_BYTES,
    **options: Any,
) -> SealedFile:  # fmt: skip
    """Write each table in `parts` as a row group. `identity` is the file's future path in the trace."""
    with checked_writer(path, identity, schema, block_bytes=block_bytes, **options) as writer:
        for part in parts:
            writer.write(part)
    return writer.sealed


class CheckedWriter:
    def __init__(self, parquet: pq.ParquetWriter):
        self._parquet = parquet
        self.num_rows = 0
        self.steps: tuple[int, int] | None = None
        self.sealed: SealedFile
        """Set when the file is closed."""

    def write(self, part: pa.Table) -> None:
        self._parquet.write_table(part, row_group_size=max(part.num_rows, 1))
        self.num_rows += part.num_rows
        if part.num_rows and "step" in part.column_names:
            steps = np.asarray(part["step"])
            first, last = self.steps or (steps[0], steps[0])
            self.steps = int(min(first, steps.min())), int(max(last, steps.max()))


@contextmanager
def checked_writer(
    path: Path, identity: str, schema: pa.Schema, *, block_bytes: int = BLOCK_BYTES, **options: Any
) -> Iterator[CheckedWriter]:
    with open(path, "xb", buffering=0) as file:
        hashed = _HashedFile(file, block_bytes)
        with pq.ParquetWriter(pa.PythonFile(hashed, mode="w"), schema, **options) as parquet:
            yield (writer := CheckedWriter(parquet))
            blocks = base64.b64encode(hashed.digests.blocks)
            hashed.footer = bytearray()
            size = {} if block_bytes == BLOCK_BYTES else {BLOCK_SIZE: str(block_bytes).encode()}
            parquet.add_key_value_metadata({IDENTITY: identity.encode(), BLOCKS: blocks, **size})
    digests = hashed.digests
    writer.sealed = SealedFile(
        num_bytes=digests.num_bytes, hash=digests.hash, num_rows=writer.num_rows, steps=writer.steps,
        footer=short_hash(hashed.footer),
    )  # fmt: skip


class _HashedFile(io.RawIOBase):
    """Hashes the bytes written to a file. Once `footer` is set, also appends the bytes to `footer`."""

    def __init__(self, file: io.FileIO, block_bytes: int):
        self._file = file
        self.digests = BlockDigests(block_bytes)
        self.footer: bytearray | None = None

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        view = memoryview(content)
        self.digests.add(view)
        if self.footer is not None:
            self.footer += view
        left = view
        while len(left):
            left = left[self._file.write(left) :]
        return len(view)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParquetFooter:
    num_bytes: int
    num_rows: int
    schema: pa.Schema
    metadata: dict[bytes, bytes]
    content: bytes
    """The footer, its length field and the magic number."""
    hash: str

    @property
    def identity(self) -> str | None:
        name = self.metadata.get(IDENTITY)
        return None if name is None else name.decode("utf-8", "replace")

    @property
    def _block_bytes(self) -> int:
        size = int(self.metadata.get(BLOCK_SIZE, BLOCK_BYTES))
        if size not in BLOCK_SIZES:
            raise ValueError(f"unsupported block size: {size:,} bytes")
        return size

    def verified(
        self, store: Store, relative: str, *, keeps_tail: bool = False, is_checked: bool = True
    ) -> VerifiedFile:
        where, none = store.shown(relative), FileChecksums(blocks=None)
        checksums = self.checksums(where, keeps_tail=keeps_tail) if is_checked else none
        return VerifiedFile(store, relative, self.num_bytes, checksums)

    def checksums(self, where: str, *, keeps_tail: bool) -> FileChecksums:
        try:
            return FileChecksums(
                blocks=base64.b64decode(self.metadata.get(BLOCKS, b""), validate=True),
                block_bytes=self._block_bytes, tail_bytes=len(self.content), tail_hash=self.hash,
                tail=self.content if keeps_tail else None,
            )  # fmt: skip
        except ValueError as error:
            raise unreadable_checksums(where, error) from error


def read_footer(store: Store, relative: str, num_bytes: int, *, tail_bytes: int = _TAIL_BYTES) -> ParquetFooter:
    try:
        content = _read_tail(store, relative, num_bytes, tail_bytes)
        found = pq.read_metadata(pa.BufferReader(MAGIC + content))
        _check_counts(found, num_bytes)
        return ParquetFooter(
            num_bytes=num_bytes, num_rows=found.num_rows, schema=found.schema.to_arrow_schema(),
            metadata=found.metadata or {}, content=content, hash=short_hash(content),
        )  # fmt: skip
    except (DamagedTrace, StorageError, FileNotFoundError):
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise damaged(f"{store.shown(relative)} cannot be read as Parquet ({first_line(error)})") from error


def _read_tail(store: Store, relative: str, num_bytes: int, tail_bytes: int) -> bytes:
    def read(start: int) -> bytes:
        try:
            return store.read_range(relative, start, num_bytes)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise unreadable(store.shown(relative), error) from error

    tail = read(max(num_bytes - tail_bytes, 0))
    if len(tail) < 12 or tail[-4:] != MAGIC:
        raise ValueError("no Parquet magic number at the end")
    length = struct.unpack("<i", tail[-8:-4])[0] + 8
    if not 8 < length <= min(num_bytes - 4, MAX_FOOTER_BYTES):
        raise ValueError(f"invalid footer size, {length - 8:,} bytes")
    return tail[-length:] if length <= len(tail) else read(num_bytes - length)


def _check_counts(found: Any, num_bytes: int) -> None:
    """Raise ValueError for implausible counts in a footer. A few run-length encoded bytes could claim any count."""
    most = _FREE_VALUES + _VALUES_A_BYTE * num_bytes
    groups = [found.row_group(number) for number in range(found.num_row_groups)]
    rows = [group.num_rows for group in groups]
    if min(rows, default=0) < 0 or sum(rows) != found.num_rows or found.num_rows > most:
        raise ValueError(f"the footer claims {found.num_rows:,} rows in {num_bytes:,} bytes")
    for index in range(found.num_columns):
        values = [group.column(index).num_values for group in groups]
        if min(values, default=0) < 0 or sum(values) > most:
            raise ValueError(f"the footer claims {sum(values):,} values in {num_bytes:,} bytes")


PROTOCOL = "tim"


class TraceFiles(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Serves registered files under URLs such as tim://0/scores/12."""

    protocol = PROTOCOL
    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self._files: dict[str, VerifiedFile | bytes] = {}
        self._chosen: dict[str, Sequence[str]] = {}
        self.num_asked: Counter[str] = Counter()
        """Number of times DuckDB or Arrow expanded each glob pattern."""

    def add(self, name: str, file: VerifiedFile | bytes) -> str:
        self._files[name] = file
        return self.url(name)

    def choose(self, pattern: str, names: Sequence[str]) -> None:
        self._chosen[pattern] = names

    @staticmethod
    def url(name: str) -> str:
        return f"{PROTOCOL}://{name}"

    @property
    def error(self) -> DamagedTrace | QueryFailed | None:
        files = (file for file in self._files.values() if isinstance(file, VerifiedFile))
        return next((file.error for file in files if file.error is not None), None)

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        name = self._strip_protocol(path)
        if name not in self._files:
            raise FileNotFoundError(path)
        file = self._files[name]
        size = file.shown_bytes if isinstance(file, VerifiedFile) else len(file)
        return {"name": name, "size": size, "type": "file", "mtime": 0.0}

    def exists(self, path: str, **_: Any) -> bool:
        return self._strip_protocol(path) in self._files

    def glob(self, path: str, **_: Any) -> list[str]:
        pattern = self._strip_protocol(path)
        if pattern in self._chosen:
            self.num_asked[pattern] += 1
            return list(self._chosen[pattern])
        return [path] if self.exists(path) else []

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        return [self.info(path) if detail else self.info(path)["name"]]

    def modified(self, path: str) -> Any:
        return datetime.fromtimestamp(0.0, UTC)  # a trace's finished files never change

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        file = self._files[self._strip_protocol(path)]
        return FileCursor(file) if isinstance(file, VerifiedFile) else io.BytesIO(file)
