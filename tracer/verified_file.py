"""A finished file of a trace, of which every byte is compared with a checksum before anybody gets it."""

from __future__ import annotations

import threading

import xxhash

from ..schemas.checksums import BLOCK_BYTES, DIGEST_BYTES, Bytes, block_digest, short_hash
from ..schemas.errors import DamagedTrace
from .store import Store, unreadable


class VerifiedFile:
    """Reads ranges of a file. Raises DamagedTrace, which names the file, for bytes that are not those that were written.

    `blocks` holds the checksums of the file's blocks of BLOCK_BYTES, DIGEST_BYTES each; None is a file that has none, of
    which nothing but its length is compared. The last `tail_bytes` belong to no block; their checksum is `tail_hash`. A
    block is compared once.
    """

    def __init__(
        self,
        store: Store,
        relative: str,
        num_bytes: int,
        blocks: bytes | None,
        *,
        tail_bytes: int = 0,
        tail_hash: str = "",
    ):
        self.store, self.relative, self.num_bytes = store, relative, num_bytes
        self._blocks, self._tail_hash = blocks, tail_hash
        self._end = num_bytes - tail_bytes
        count = -(-self._end // BLOCK_BYTES)
        if blocks is not None and len(blocks) != count * DIGEST_BYTES:
            raise ValueError(f"{len(blocks) // DIGEST_BYTES} for {count} blocks")
        self._seen = bytearray(count)
        self._failed: DamagedTrace | None = None
        self._lock = threading.Lock()

    @property
    def has_checksums(self) -> bool:
        return self._blocks is not None

    @property
    def error(self) -> DamagedTrace | None:
        """What the first failed read found; None while all were right."""
        return self._failed

    def read(self, start: int, stop: int) -> bytes:
        """Bytes [start, stop), of which those beyond the end are left out."""
        start, stop = min(start, self.num_bytes), min(stop, self.num_bytes)
        try:
            if stop <= self._end:
                return self._read(start, stop)
            before = self._read(start, self._end) if start < self._end else b""
            return before + self._read_tail()[max(start - self._end, 0) : stop - self._end]
        except DamagedTrace as error:
            self._failed = self._failed or error
            raise

    def verify(self) -> str:
        """Read all of it and return XXH3-128 of that, 32 hexadecimal digits. Raises DamagedTrace."""
        if (size := self.store.file_size(self.relative)) > self.num_bytes:
            raise DamagedTrace(
                f"{self.store.shown(self.relative)}: has {size - self.num_bytes:,} bytes more than were written; restore it from a "
                "copy"
            )
        whole = xxhash.xxh3_128()
        for start in range(0, self._end, 16 * BLOCK_BYTES):
            whole.update(self.read(start, min(start + 16 * BLOCK_BYTES, self._end)))
        whole.update(self.read(self._end, self.num_bytes))
        return whole.hexdigest()

    def _read(self, start: int, stop: int) -> bytes:
        if stop <= start:
            return b""
        content = self._fetch(start, stop)
        if self._blocks is None:
            return content
        view = memoryview(content)
        for index in range(start // BLOCK_BYTES, (stop - 1) // BLOCK_BYTES + 1):
            if not self._seen[index]:
                begin, end = index * BLOCK_BYTES, min((index + 1) * BLOCK_BYTES, self._end)
                asked = view[max(begin - start, 0) : end - start]
                before = self._fetch(begin, start) if begin < start else b""
                after = self._fetch(stop, end) if stop < end else b""
                self._compare(index, (before, asked, after))
        return content

    def _read_tail(self) -> bytes:
        if self._end == self.num_bytes:
            return b""
        tail = self._fetch(self._end, self.num_bytes)
        if short_hash(tail) != self._tail_hash:
            raise DamagedTrace(
                f"{self.store.shown(self.relative)}: its last {len(tail):,} bytes are not those that were there before; "
                "restore it from a copy"
            )
        return tail

    def _fetch(self, start: int, stop: int) -> bytes:
        where = self.store.shown(self.relative)
        try:
            content = self.store.read_range(self.relative, start, stop)
        except OSError as error:
            raise unreadable(where, error) from error
        if len(content) != stop - start:
            raise DamagedTrace(
                f"{where}: ends at byte {start + len(content):,} of {self.num_bytes:,}; restore it from a copy"
            )
        return content

    def _compare(self, index: int, parts: tuple[Bytes, ...]) -> None:
        assert self._blocks is not None
        if block_digest(*parts) != self._blocks[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]:
            begin = index * BLOCK_BYTES
            raise DamagedTrace(
                f"{self.store.shown(self.relative)}: damaged between bytes {begin:,} and "
                f"{begin + sum(map(len, parts)):,} (the checksum differs); restore it from a copy, or "
                "move it away to ask the rest"
            )
        with self._lock:
            self._seen[index] = 1


class FileCursor:
    """A VerifiedFile as Python's file objects are used: what DuckDB and Arrow read through."""

    def __init__(self, file: VerifiedFile):
        self._file = file
        self._position = 0
        self.closed = False
        self.mode = "rb"

    @property
    def size(self) -> int:
        return self._file.num_bytes

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = offset + (0, self._position, self._file.num_bytes)[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int = -1) -> bytes:
        stop = self._file.num_bytes if size < 0 else self._position + size
        content = self._file.read(self._position, stop)
        self._position += len(content)
        return content

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False

    def flush(self) -> None: ...

    def close(self) -> None:
        self.closed = True
