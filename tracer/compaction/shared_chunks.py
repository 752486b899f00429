"""Parquet files that store equal column chunks once, such as the logprobs of `current` where they equal `train`.

A footer gives the byte offset of each column chunk, and the format does not require offsets to differ: two row groups with the
same bytes in a column point to one copy. Every Parquet reader reads such a file.
"""

from __future__ import annotations

import base64
import os
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from ...schemas.checksums import BlockDigests, SealedFile, short_hash, whole_hash
from ..parquet_file import BLOCKS, MAGIC
from .thrift import Struct, read_struct, write_struct

MIN_BYTES = 1 << 10
"""Smaller chunks are not shared, so that columns read together stay adjacent."""

# Numbers of fields in parquet.thrift: https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift
_ROW_GROUPS, _KEY_VALUES = 4, 5
_COLUMNS, _GROUP_OFFSET = 1, 5
_CHUNK_OFFSET, _META_DATA = 2, 3
_SIZE, _DATA_OFFSET, _DICTIONARY_OFFSET = 7, 9, 11
_KEY, _VALUE = 1, 2
_OTHER_PLACES = ((4, 6), (10, 14))
"""Fields of a column chunk and of its metadata with further offsets: page indexes and filters, which tim-trace does not write."""


def share_chunks(path: Path, sealed: SealedFile, block_bytes: int) -> SealedFile:
    """Rewrite a file so that equal chunks are stored once, and return its new account; unchanged if none are equal."""
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
    """Return the fields of a footer, and its offset."""
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
    """Return old offset -> new offset of each chunk; None if no two chunks are equal."""
    at = expected = len(MAGIC)
    known: dict[tuple[int, str], int] = {}
    moved: dict[int, int] = {}
    for chunk in chunks:
        start, size = _place(chunk)
        if start != expected or _has_other_places(chunk):
            return None  # not just column chunks, one after the other
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
    """Write each chunk once, in file order."""
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
            if chunk[_CHUNK_OFFSET][1]:  # 0 if the chunk's metadata is only in the footer, as the format asks
                chunk[_CHUNK_OFFSET] = chunk[_CHUNK_OFFSET][0], chunk[_CHUNK_OFFSET][1] + moved[start] - start
            firsts.append(moved[start])
        if _GROUP_OFFSET in group:
            group[_GROUP_OFFSET] = group[_GROUP_OFFSET][0], firsts[0]


def _set_value(footer: Struct, name: bytes, value: bytes) -> None:
    for pair in footer[_KEY_VALUES][1][1]:
        if pair[_KEY][1] == name:
            pair[_VALUE] = pair[_VALUE][0], value
