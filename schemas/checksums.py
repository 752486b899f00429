"""Checksums of what a trace holds: XXH3 (https://xxhash.com), 64 bits of a block and 128 of a whole file.

They find damage. They are no signature: whoever can write a trace can write its checksums, too.
"""

from __future__ import annotations

from dataclasses import dataclass

import xxhash

BLOCK_BYTES = 256 << 10
"""Bytes that one checksum of a file is over: what a read has to look at more than it was asked for."""
SMALL_BLOCK_BYTES = 64 << 10
"""The same of files that are made to be read in small parts from object storage."""
BLOCK_SIZES = (BLOCK_BYTES, SMALL_BLOCK_BYTES)
DIGEST_BYTES = 8
"""Bytes of a block's checksum."""

Bytes = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedFile:
    """What a writer says of a file that it finished; no such file ever changes."""

    num_bytes: int
    hash: str
    """XXH3-128 of all its bytes, 32 hexadecimal digits, as `xxhsum -H2` prints it."""
    num_rows: int | None = None
    """Of a table; None for any other file."""
    steps: tuple[int, int] | None = None
    """First and last step of a table's rows; None for any other file, and of a table without rows."""
    footer: str | None = None
    """XXH3-64 of a Parquet file's footer, 16 hexadecimal digits; None for any other file."""


def sealed(content: Bytes) -> SealedFile:
    """What to say of a file of this content."""
    return SealedFile(num_bytes=len(content), hash=whole_hash(content))


def whole_hash(content: Bytes) -> str:
    """XXH3-128 of a content, 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(content)


def short_hash(content: Bytes) -> str:
    """XXH3-64 of a content, 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(content)


class BlockDigests:
    """Checksums of a stream's blocks, and of all of it, while it passes by."""

    def __init__(self, block_bytes: int = BLOCK_BYTES) -> None:
        self._block_bytes = block_bytes
        self._whole = xxhash.xxh3_128()
        self._block = xxhash.xxh3_64()
        self._ended: list[bytes] = []
        self.num_bytes = 0

    def add(self, content: Bytes) -> None:
        """Add the next bytes, however many."""
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
        """DIGEST_BYTES a block of what was added so far, one after the other; the last block may be shorter."""
        begun = [self._block.digest()] if self.num_bytes % self._block_bytes else []
        return b"".join([*self._ended, *begun])

    @property
    def hash(self) -> str:
        return self._whole.hexdigest()


def block_digest(*parts: Bytes) -> bytes:
    """XXH3-64 of a block that lies in parts, big-endian."""
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part)
    return digest.digest()
