"""XXH3 checksums (https://xxhash.com), 64 bits per block and 128 per file. They detect corruption, not tampering."""

from __future__ import annotations

from dataclasses import dataclass

import xxhash

BLOCK_BYTES = 256 << 10
"""Number of bytes covered by each checksum. Reads are extended to whole blocks, so that they can be verified."""
SMALL_BLOCK_BYTES = 64 << 10
BLOCK_SIZES = (BLOCK_BYTES, SMALL_BLOCK_BYTES)
DIGEST_BYTES = 8

Bytes = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedFile:
    """Size, checksums and row range of a file that is never modified again."""

    num_bytes: int
    hash: str
    """XXH3-128 in 32 hex digits, as printed by `xxhsum -H2`. Empty if another program wrote the file without a hash."""
    num_rows: int | None = None
    steps: tuple[int, int] | None = None
    """First and last step in a table file. None if the table is empty or the file is not a table."""
    footer: str | None = None
    """XXH3-64 of a Parquet file's footer, in 16 hex digits."""


whole_hash = xxhash.xxh3_128_hexdigest
short_hash = xxhash.xxh3_64_hexdigest


def sealed(content: Bytes) -> SealedFile:
    return SealedFile(num_bytes=len(content), hash=whole_hash(content))


class BlockDigests:
    """One checksum per block plus one for the whole stream, updated as the stream grows."""

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
        """Checksums of the blocks so far, concatenated (DIGEST_BYTES each). The last block may be incomplete."""
        begun = [self._block.digest()] if self.num_bytes % self._block_bytes else []
        return b"".join([*self._ended, *begun])

    @property
    def hash(self) -> str:
        return self._whole.hexdigest()
