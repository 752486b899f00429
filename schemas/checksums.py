"""Checksums of a trace's files: XXH3 (https://xxhash.com), 64 bits per block and 128 bits per file.

The checksums detect corruption, not tampering: anyone who can write a trace can also write its checksums.
"""

from __future__ import annotations

from dataclasses import dataclass

import xxhash

BLOCK_BYTES = 256 << 10
"""Bytes covered by one block checksum. Reads are extended to whole blocks so that they can be verified."""
SMALL_BLOCK_BYTES = 64 << 10
"""Block size of files that are read in small pieces from object storage."""
BLOCK_SIZES = (BLOCK_BYTES, SMALL_BLOCK_BYTES)
DIGEST_BYTES = 8

Bytes = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedFile:
    """Size, checksums and row range of a finished file, which never changes again."""

    num_bytes: int
    hash: str
    """XXH3-128 of the whole file, 32 hexadecimal digits, as printed by `xxhsum -H2`."""
    num_rows: int | None = None
    """Number of rows in a table file; None for other files."""
    steps: tuple[int, int] | None = None
    """First and last step in a table file; None for other files and empty tables."""
    footer: str | None = None
    """XXH3-64 of a Parquet file's footer, 16 hexadecimal digits; None for other files."""


def sealed(content: Bytes) -> SealedFile:
    return SealedFile(num_bytes=len(content), hash=whole_hash(content))


def whole_hash(content: Bytes) -> str:
    """Return the XXH3-128 as 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(content)


def short_hash(content: Bytes) -> str:
    """Return the XXH3-64 as 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(content)


class BlockDigests:
    """Checksums of a stream, updated as it grows: one per block and one for the whole stream."""

    def __init__(self, block_bytes: int = BLOCK_BYTES) -> None:
        self._block_bytes = block_bytes
        self._whole = xxhash.xxh3_128()
        self._block = xxhash.xxh3_64()
        self._ended: list[bytes] = []
        self.num_bytes = 0

    def add(self, content: Bytes) -> None:
        view, start = memoryview(content), 0
        while start < len(view):
            part = view[start : start + self._block_bytes - self.num_bytes % self._block_bytes]
            self._whole.update(part)
            self._block.update(part)
            self.num_bytes += len(part)
            start += len(part)
            if self.num_bytes % self._block_bytes == 0:
                self._ended.append(self._block.digest())
                self._block.reset()

    @property
    def blocks(self) -> bytes:
        """Concatenated checksums of all blocks so far, DIGEST_BYTES bytes each. The last block may be incomplete."""
        begun = [self._block.digest()] if self.num_bytes % self._block_bytes else []
        return b"".join([*self._ended, *begun])

    @property
    def hash(self) -> str:
        return self._whole.hexdigest()


def block_digest(*parts: Bytes) -> bytes:
    """Return the big-endian XXH3-64 of a block, given in one or more pieces."""
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part)
    return digest.digest()
