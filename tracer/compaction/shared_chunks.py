"""Stores identical column chunks in a Parquet file only once, for example the logprobs in pass `current` if they equal
those in `train`.

The footer of a Parquet file lists each column chunk's byte offset, and the format does not require these offsets to
differ. Two row groups whose column has the same bytes can therefore point to one copy. Every Parquet reader can read
such a file.
"""

from __future__ import annotations

import base64
import os
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from ...schemas.checksums import BlockDigests, SealedFile, short_hash, whole_hash
from ..parquet_file import BLOCKS, MAGIC

MIN_BYTES = 1 << 10
"""Minimum size of a chunk to be shared, bytes. Smaller chunks stay where they are, so that columns read together stay
adjacent.
"""

# Numbers of fields in parquet.thrift: https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift
_ROW_GROUPS, _KEY_VALUES = 4, 5
_COLUMNS, _GROUP_OFFSET = 1, 5
_CHUNK_OFFSET, _META_DATA = 2, 3
_SIZE, _DATA_OFFSET, _DICTIONARY_OFFSET = 7, 9, 11
_KEY, _VALUE = 1, 2
_OTHER_PLACES = ((4, 6), (10, 14))
"""Field numbers of further offsets in a column chunk and in its metadata. They belong to page indexes and Bloom
filters, which tim-trace does not write.
"""

# Thrift's compact protocol: https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md
_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 11, 12
_INTEGERS = (4, 5, 6)
_LONG_LIST, _MAX_DELTA = 15, 15

Struct = dict[int, tuple[int, Any]]
"""Field number -> its Thrift type and value. A list's value is a pair: the element type, and the elements."""


def share_chunks(path: Path, sealed: SealedFile, block_bytes: int) -> SealedFile:
    """Rewrite a file so that identical chunks are stored once, and return its new record. If no chunks are identical,
    return the old record.
    """
    with open(path, "rb") as source:
        footer, end = _footer(source)
        chunks = sorted(_chunks(footer), key=lambda chunk: _place(chunk)[0])
        moved = _moved(source, chunks, end)
        if moved is None:
            return sealed
        target_path = path.with_name(f"{path.name}-shared")
        digests = BlockDigests(block_bytes)
        with open(target_path, "xb") as target:
            _copy(source, target, digests, chunks, moved)
            _set_places(footer, moved)
            _set_value(footer, BLOCKS, base64.b64encode(digests.blocks))
            content = write_struct(footer)
            tail = content + struct.pack("<i", len(content)) + MAGIC
            digests.add(tail)
            target.write(tail)
    os.replace(target_path, path)
    return replace(sealed, num_bytes=digests.num_bytes, hash=digests.hash, footer=short_hash(tail))


def _footer(source: BinaryIO) -> tuple[Struct, int]:
    """Return the fields in a Parquet file's footer, and the footer's byte offset."""
    end = source.seek(-8, os.SEEK_END)
    (size,) = struct.unpack("<i", source.read(4))
    source.seek(end - size)
    return read_struct(source.read(size)), end - size


def _chunks(footer: Struct) -> Iterator[Struct]:
    for group in footer[_ROW_GROUPS][1][1]:
        yield from group[_COLUMNS][1][1]


def _place(chunk: Struct) -> tuple[int, int]:
    """Return the offset and size of a column chunk."""
    meta = chunk[_META_DATA][1]
    starts = [meta[field][1] for field in (_DICTIONARY_OFFSET, _DATA_OFFSET) if field in meta]
    return min(starts), meta[_SIZE][1]


def _moved(source: BinaryIO, chunks: list[Struct], end: int) -> dict[int, int] | None:
    """Return each chunk's old offset -> its new offset; None if no two chunks are identical."""
    at = expected = len(MAGIC)
    known: dict[tuple[int, str], int] = {}
    moved: dict[int, int] = {}
    for chunk in chunks:
        start, size = _place(chunk)
        if start != expected or _has_other_places(chunk):
            return None  # The file contains something besides consecutive column chunks.
        expected += size
        source.seek(start)
        key = size, whole_hash(source.read(size))
        if size < MIN_BYTES or key not in known:
            known[key] = at
            at += size
        moved[start] = known[key]
    return moved if at < expected == end else None


def _has_other_places(chunk: Struct) -> bool:
    of_chunk, of_meta = _OTHER_PLACES
    return any(field in chunk for field in of_chunk) or any(field in chunk[_META_DATA][1] for field in of_meta)


def _copy(
    source: BinaryIO, target: BinaryIO, digests: BlockDigests, chunks: list[Struct], moved: dict[int, int]
) -> None:
    """Copy each distinct chunk once, in file order."""
    target.write(MAGIC)
    digests.add(MAGIC)
    for chunk in chunks:
        start, size = _place(chunk)
        if moved[start] == digests.num_bytes:
            source.seek(start)
            content = source.read(size)
            target.write(content)
            digests.add(content)


def _set_places(footer: Struct, moved: dict[int, int]) -> None:
    for group in footer[_ROW_GROUPS][1][1]:
        firsts = []
        for chunk in group[_COLUMNS][1][1]:
            start, meta = _place(chunk)[0], chunk[_META_DATA][1]
            for field in (_DATA_OFFSET, _DICTIONARY_OFFSET):
                if field in meta:
                    meta[field] = meta[field][0], meta[field][1] + moved[start] - start
            # This offset is 0 if the chunk's metadata is stored only in the footer, as the format recommends.
            if chunk[_CHUNK_OFFSET][1]:
                chunk[_CHUNK_OFFSET] = chunk[_CHUNK_OFFSET][0], chunk[_CHUNK_OFFSET][1] + moved[start] - start
            firsts.append(moved[start])
        if _GROUP_OFFSET in group:
            group[_GROUP_OFFSET] = group[_GROUP_OFFSET][0], firsts[0]


def _set_value(footer: Struct, name: bytes, value: bytes) -> None:
    for pair in footer[_KEY_VALUES][1][1]:
        if pair[_KEY][1] == name:
            pair[_VALUE] = pair[_VALUE][0], value


def read_struct(content: bytes) -> Struct:
    """Parse the Thrift struct at the start of `content`. Raises ValueError."""
    try:
        return _Reader(content).struct()
    except IndexError as error:
        raise ValueError("it ends within a value") from error


def write_struct(fields: Struct) -> bytes:
    """Encode a Thrift struct in the compact protocol."""
    target = bytearray()
    _put_struct(target, fields)
    return bytes(target)


class _Reader:
    def __init__(self, content: bytes):
        self._content, self._at = content, 0

    def struct(self) -> Struct:
        found: Struct = {}
        number = 0
        while header := self._byte():
            number = number + (header >> 4) if header >> 4 else _unfolded(self._varint())
            kind = header & 15
            found[number] = kind, (kind == _TRUE if kind in (_TRUE, _FALSE) else self._value(kind))
        return found

    def _value(self, kind: int) -> Any:
        # In a list, each bool takes a byte; in a struct it is part of the field's type.
        if kind in (_TRUE, _FALSE, _BYTE):
            return self._byte()
        if kind in _INTEGERS:
            return _unfolded(self._varint())
        if kind == _DOUBLE:
            return self._bytes(8)
        if kind == _BINARY:
            return self._bytes(self._varint())
        if kind in (_LIST, _SET):
            header = self._byte()
            size = header >> 4 if header >> 4 < _LONG_LIST else self._varint()
            return header & 15, [self._value(header & 15) for _ in range(size)]
        if kind == _STRUCT:
            return self.struct()
        raise ValueError(f"it has a value of unknown type {kind}")

    def _byte(self) -> int:
        self._at += 1
        return self._content[self._at - 1]

    def _bytes(self, size: int) -> bytes:
        self._at += size
        if self._at > len(self._content):
            raise IndexError
        return self._content[self._at - size : self._at]

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7


def _put_struct(target: bytearray, fields: Struct) -> None:
    before = 0
    for number, (kind, value) in sorted(fields.items()):
        if 0 < number - before <= _MAX_DELTA:
            target.append((number - before) << 4 | kind)
        else:
            target.append(kind)
            _put_varint(target, _folded(number))
        before = number
        if kind not in (_TRUE, _FALSE):
            _put_value(target, kind, value)
    target.append(0)


def _put_value(target: bytearray, kind: int, value: Any) -> None:
    if kind in (_TRUE, _FALSE, _BYTE):
        target.append(value)
    elif kind in _INTEGERS:
        _put_varint(target, _folded(value))
    elif kind == _DOUBLE:
        target += value
    elif kind == _BINARY:
        _put_varint(target, len(value))
        target += value
    elif kind in (_LIST, _SET):
        of, values = value
        if len(values) < _LONG_LIST:
            target.append(len(values) << 4 | of)
        else:
            target.append(_LONG_LIST << 4 | of)
            _put_varint(target, len(values))
        for item in values:
            _put_value(target, of, item)
    else:
        _put_struct(target, value)


def _put_varint(target: bytearray, value: int) -> None:
    while value > 127:
        target.append(value & 127 | 128)
        value >>= 7
    target.append(value)


def _folded(value: int) -> int:
    """Encode a signed integer as an unsigned one by zigzag: 0, -1, 1, -2, ... become 0, 1, 2, 3, ..."""
    return value << 1 if value >= 0 else -value * 2 - 1


def _unfolded(value: int) -> int:
    return -(value >> 1) - 1 if value & 1 else value >> 1
