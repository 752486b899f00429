"""The journal: a writer's unsealed records in Arrow IPC streams that survive a killed process.

Any Arrow library can read the stream. Each message's metadata ends with a 32-byte trailer, stored in padding that the
format allows. It holds the 8 bytes `tim-jrnl`, the message body's length (int64, little-endian) and an XXH3-128
checksum (big-endian). The checksum covers the previous message's checksum (16 zero bytes for the first message),
then this message without the trailer's checksum. This chain detects missing, duplicated and reordered messages.
"""

from __future__ import annotations

import errno
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import xxhash

from ..schemas.layout import TABLES, Segment
from .store import Store, first_line
from .whole_file import check_inside, check_there, sync

DENSE_TABLE = "dense"
JOURNALED = (*TABLES, DENSE_TABLE)

DENSE_SCHEMA = pa.schema(
    [
        pa.field("group", pa.string(), nullable=False),
        pa.field("array", pa.string(), nullable=False),
        pa.field("dtype", pa.string(), nullable=False),
        pa.field("start", pa.int64(), nullable=False),
        pa.field("rows", pa.int64(), nullable=False),
        pa.field("data", pa.large_binary(), nullable=False),
    ]
)

BFLOAT16 = "bfloat16"
DATA_TYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
)  # fmt: skip
"""dtypes allowed in captured arrays, named as in NumPy and Zarr. bfloat16 is stored as uint16 bits."""

IDENTITY = b"tim-trace file"
"""Schema metadata key for the path where the journal was written."""

_HEADER_TYPE, _HEADER, _COMPRESSION, _RECORD_BATCH = 1, 2, 3, 3
"""Field numbers in Arrow's Message and RecordBatch tables, and the RecordBatch message type."""
_PREFIX = struct.Struct("<II")
_CONTINUES = 0xFFFFFFFF
_MAGIC = b"tim-jrnl"
_TRAILER = struct.Struct("<8sq16s")
_INITIAL_CHECKSUM = bytes(16)
_END_OF_STREAM = _PREFIX.pack(_CONTINUES, 0)


class JournalStream:
    """Appends one table's record batches to a segment's journal. The batches survive if the process is killed."""

    def __init__(self, folder: Path, segment: Segment, table: str, schema: pa.Schema):
        relative = segment.journal(table)
        check_there(folder)
        check_inside(folder, relative)
        self.path = folder / relative
        self.path.parent.mkdir(exist_ok=True)
        self._file = open(self.path, "xb", buffering=0)  # noqa: SIM115  (open for as long as the segment)
        # A link count of 0 shows that a file was removed, except on FUSE file systems that always report 0.
        self._has_links = os.fstat(self._file.fileno()).st_nlink > 0
        self.num_bytes = 0
        self.is_synced = False
        """True after `sync`. Files sealed from this journal must then survive a power failure too."""
        self._checksum = _INITIAL_CHECKSUM
        self._append_message(schema.with_metadata({IDENTITY: relative.encode()}).serialize())

    def append(self, batch: pa.RecordBatch) -> None:
        if self._has_links and not os.fstat(self._file.fileno()).st_nlink:
            raise FileNotFoundError(errno.ENOENT, "the journal was removed while it was being written", str(self.path))
        self._append_message(batch.serialize())

    def sync(self) -> None:
        if self._file.closed:
            sync(self.path)
        else:
            os.fsync(self._file.fileno())
        self.is_synced = True

    def close(self) -> None:
        try:
            self._write([memoryview(_END_OF_STREAM)])
        finally:
            self._file.close()

    def _append_message(self, message: pa.Buffer) -> None:
        view = memoryview(message)
        _, length = _PREFIX.unpack(view[: _PREFIX.size])
        metadata, body = view[_PREFIX.size : _PREFIX.size + length], view[_PREFIX.size + length :]
        prefix = _PREFIX.pack(_CONTINUES, length + _TRAILER.size)
        self._checksum = _checksum(self._checksum, prefix, metadata, body)
        trailer = _TRAILER.pack(_MAGIC, len(body), self._checksum)
        self._write([memoryview(prefix + bytes(metadata) + trailer), body])

    def _write(self, parts: list[memoryview]) -> None:
        left = [part for part in parts if len(part)]
        while left:
            written = os.writev(self._file.fileno(), left)
            self.num_bytes += written
            while left and written >= len(left[0]):
                written -= len(left.pop(0))
            if left:
                left[0] = left[0][written:]


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalContent:
    batches: tuple[pa.RecordBatch, ...]
    torn_bytes: int = 0
    """Size of an incomplete last record (bytes). A dead process left it, or a live process is still writing it."""
    damage: str | None = None
    has_begun: bool = True
    """True if the schema is complete. Only then does a writer list the journal in its state."""


def read_journal(store: Store, segment: Segment, table: str, num_bytes: int | None = None) -> JournalContent:
    """Read a journal's complete records. Raises FileNotFoundError if the segment has been sealed in the meantime."""
    relative = segment.journal(table)
    content = memoryview(store.read_bytes(relative, num_bytes))
    schema: pa.Schema | None = None
    batches: list[pa.RecordBatch] = []
    position, checksum = 0, _INITIAL_CHECKSUM
    while position < len(content):
        try:
            message, stop, checksum = _next_message(content, position, checksum)
            if message is None:
                break
            if schema is None:
                schema = _checked_schema(message, relative)
            else:
                batches.append(_batch(message, schema))
        except _Torn:
            torn_bytes = len(content) - position
            return JournalContent(batches=tuple(batches), torn_bytes=torn_bytes, has_begun=schema is not None)
        except (ValueError, OSError, MemoryError, pa.ArrowException) as error:
            damage = f"the record at byte {position:,} is damaged ({first_line(error)})"
            return JournalContent(batches=tuple(batches), damage=damage)
        position = stop
    return JournalContent(batches=tuple(batches), has_begun=schema is not None)


class _Torn(Exception):
    """The file ends within a message."""


def _next_message(content: memoryview, start: int, before: bytes) -> tuple[Any, int, bytes]:
    try:
        found = _message_end(content, start, before)
    except _Torn:
        if content[start:].tobytes().count(_MAGIC) > 1:  # more records follow, but only the last one can be incomplete
            raise ValueError("its length is wrong") from None
        raise
    if found is not None:
        stop, checksum = found
        return pa.ipc.read_message(pa.py_buffer(content[start:stop])), stop, checksum
    if len(content) > start + _PREFIX.size:
        raise ValueError(f"{len(content) - start - _PREFIX.size} bytes follow the end of the stream")
    return None, len(content), before


def _message_end(content: memoryview, start: int, before: bytes) -> tuple[int, bytes] | None:
    if len(content) - start < _PREFIX.size:
        raise _Torn
    continues, length = _PREFIX.unpack(content[start : start + _PREFIX.size])
    if continues != _CONTINUES:
        raise ValueError("no record starts there")
    if length == 0:
        return None
    if length < _TRAILER.size:
        raise ValueError("its checksum is missing")
    body = start + _PREFIX.size + length
    if body > len(content):
        raise _Torn
    trailer = body - _TRAILER.size
    magic, body_bytes, checksum = _TRAILER.unpack(content[trailer:body])
    if magic != _MAGIC or body_bytes < 0:
        raise ValueError("its checksum is missing")
    stop = body + int(body_bytes)
    if stop > len(content):
        raise _Torn
    prefix = content[start : start + _PREFIX.size]
    if _checksum(before, prefix, content[start + _PREFIX.size : trailer], content[body:stop]) != checksum:
        raise ValueError("checksum mismatch: the record was changed, or an earlier one is missing or duplicated")
    return int(stop), checksum


def _checksum(before: bytes, prefix: bytes | memoryview, metadata: memoryview, body: memoryview) -> bytes:
    digest = xxhash.xxh3_128(before)
    digest.update(prefix)
    digest.update(metadata)
    digest.update(struct.pack("<q", len(body)))
    digest.update(body)
    return digest.digest()


def _checked_schema(message: Any, relative: str) -> pa.Schema:
    schema = pa.ipc.read_schema(message)
    name = (schema.metadata or {}).get(IDENTITY, b"").decode("utf-8", "replace")
    if name != relative:
        raise ValueError(f"the file was written under another name, {name}")
    return schema


def _batch(message: Any, schema: pa.Schema) -> pa.RecordBatch:
    if _is_compressed(bytes(message.metadata)):
        raise ValueError("it is compressed")
    batch = pa.ipc.read_record_batch(message, schema)
    batch.validate(full=True)
    return batch


def _is_compressed(metadata: bytes) -> bool:
    """Return True if a RecordBatch has the `compression` field (Message.fbs, FlatBuffers table layout)."""

    def field(table: int, number: int) -> int | None:
        vtable = table - struct.unpack_from("<i", metadata, table)[0]
        size = struct.unpack_from("<H", metadata, vtable)[0]
        place = 4 + 2 * number
        offset = struct.unpack_from("<H", metadata, vtable + place)[0] if place < size else 0
        return table + offset if offset else None

    try:
        message = struct.unpack_from("<I", metadata, 0)[0]
        kind, header = field(message, _HEADER_TYPE), field(message, _HEADER)
        if kind is None or header is None or metadata[kind] != _RECORD_BATCH:
            raise ValueError("the message is not a record batch")
        return field(header + struct.unpack_from("<I", metadata, header)[0], _COMPRESSION) is not None
    except (struct.error, IndexError) as error:
        raise ValueError("the record is not an Arrow message") from error
