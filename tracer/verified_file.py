from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import xxhash

from ..schemas.checksums import BLOCK_BYTES, DIGEST_BYTES, Bytes, short_hash
from ..schemas.errors import DamagedTrace, QueryFailed
from .store import Store, damaged, unreadable

_CACHE_BYTES = 64 << 20
"""Size of the cache for blocks read from object storage (bytes). Consecutive reads are often adjacent."""
_GAP_BYTES = 64 << 10
"""Number of bytes that Arrow reads at the end of a Parquet file to find its footer. DuckDB reads only 16 KiB."""
_EXACT_REQUESTS = 4
"""Number of requests before a remote file is read ahead. The read-ahead then doubles with each request."""
_MAX_AHEAD_BYTES = 8 << 20
_SMALL_BYTES = 256 << 10
"""Reads of at most this size (bytes) from the same remote file run one at a time."""
_MAX_SPAN_BYTES = 64 << 20
"""Reads of more bytes than this are not cached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileChecksums:
    blocks: bytes | None
    """The blocks' 8-byte checksums, one after another. None if the file has no checksums."""
    block_bytes: int = BLOCK_BYTES
    tail_bytes: int = 0
    """Number of bytes at the file's end that do not belong to any block."""
    tail_hash: str = ""
    tail: bytes | None = None
    """The tail's content, if already read."""


def unreadable_checksums(where: str, reason: object) -> DamagedTrace:
    return damaged(f"{where}: its checksums cannot be read ({reason})")


class VerifiedFile:
    """Reads file ranges and verifies each block once. Raises DamagedTrace for damaged bytes.

    `checksums` may be a function that reads the checksums from the file's end when they are first needed.
    """

    def __init__(
        self, store: Store, relative: str, num_bytes: int, checksums: FileChecksums | Callable[[], FileChecksums]
    ):
        self.store, self.relative, self.num_bytes = store, relative, num_bytes
        self._read_checksums = None if isinstance(checksums, FileChecksums) else checksums
        self._num_requests = 0
        self.error: DamagedTrace | QueryFailed | None = None
        self._lock, self._alone = threading.Lock(), threading.Lock()
        if isinstance(checksums, FileChecksums):
            self._set_checksums(checksums)

    def _set_checksums(self, checksums: FileChecksums) -> None:
        blocks, size = checksums.blocks, checksums.block_bytes
        self._blocks, self._block_bytes = blocks, size
        self._tail_hash, self._tail = checksums.tail_hash, checksums.tail
        self._end = self.num_bytes - checksums.tail_bytes
        count = -(-self._end // size)
        if blocks is not None and len(blocks) != count * DIGEST_BYTES:
            reason = f"{len(blocks) // DIGEST_BYTES} checksums for {count} blocks"
            raise unreadable_checksums(self.store.shown(self.relative), reason)
        self._seen = bytearray(count)

    def _load_checksums(self) -> None:
        if self._read_checksums is None:
            return
        with self._alone:
            if self._read_checksums is not None:
                try:
                    self._set_checksums(self._read_checksums())
                except FileNotFoundError as error:
                    self.error = self._disappeared()
                    raise self.error from error
                except DamagedTrace as error:
                    self.error = error
                    raise
                self._read_checksums = None

    def _disappeared(self) -> QueryFailed:
        where = self.store.shown(self.relative)
        return QueryFailed(f"{where} disappeared while being read, because it was merged or removed. Try again")

    def read(self, start: int, stop: int) -> bytes:
        self._load_checksums()
        start, stop = min(start, self.num_bytes), min(stop, self.num_bytes)
        try:
            if stop <= self._end:
                return self._read(start, stop)
            before = self._read(start, self._end) if start < self._end else b""
            tail = self._read_tail() if self._tail is None else self._tail
            return before + tail[max(start - self._end, 0) : stop - self._end]
        except (DamagedTrace, QueryFailed) as error:
            self.error = self.error or error
            raise

    @property
    def shown_bytes(self) -> int:
        return self.num_bytes + self._gap

    @property
    def _gap(self) -> int:
        self._load_checksums()
        return 0 if self._tail is None else _GAP_BYTES

    def read_shown(self, start: int, stop: int) -> bytes:
        """Read bytes [start, stop) of the content that FileCursor shows.

        If the tail is in memory, FileCursor shows a gap of zeros before it. Parquet readers look for the footer by
        reading more bytes than it contains. The extra bytes come from the gap, so no request is needed for them.
        """
        if not self._gap or stop <= self._end:
            return self.read(start, stop)
        before = self.read(start, self._end) if start < self._end else b""
        zeros = max(min(stop, self._end + self._gap) - max(start, self._end), 0)
        tail = self.read(max(start - self._gap, self._end), stop - self._gap) if stop > self._end + self._gap else b""
        return before + bytes(zeros) + tail

    def verify(self) -> str:
        self._load_checksums()
        if (size := self.store.file_size(self.relative)) > self.num_bytes:
            where = self.store.shown(self.relative)
            raise damaged(f"{where} is {size - self.num_bytes:,} bytes longer than when it was written")
        whole = xxhash.xxh3_128()
        for start in range(0, self._end, 16 * BLOCK_BYTES):
            whole.update(self.read(start, min(start + 16 * BLOCK_BYTES, self._end)))
        try:
            whole.update(self._read_tail())
        except (DamagedTrace, QueryFailed) as error:
            self.error = self.error or error
            raise
        return whole.hexdigest()

    def _read(self, start: int, stop: int) -> bytes:
        if stop <= start:
            return b""
        if not self.store.is_local:
            # Small reads run one at a time, so that later reads benefit from read-ahead.
            with self._alone if stop - start <= _SMALL_BYTES else nullcontext():
                return self._read_blocks(start, stop)
        content = self._fetch(start, stop)
        view, size = memoryview(content), self._block_bytes
        for index in range(start // size, (stop - 1) // size + 1):
            if not self._seen[index]:
                begin, end = index * size, min((index + 1) * size, self._end)
                asked = view[max(begin - start, 0) : end - start]
                before = self._fetch(begin, start) if begin < start else b""
                after = self._fetch(stop, end) if stop < end else b""
                self._compare(index, (before, asked, after))
        return content

    def _read_blocks(self, start: int, stop: int) -> bytes:
        size = self._block_bytes
        wanted = range(start // size, (stop - 1) // size + 1)
        held = {index: _block_cache.get((self, index)) for index in wanted}
        missing = [index for index in wanted if held[index] is None]
        if missing:
            begin = missing[0] * size
            end = min(max((missing[-1] + 1) * size, begin + self._ahead_bytes()), self._end)
            span = memoryview(self._fetch(begin, end))
            for index in range(missing[0], -(-end // size)):
                block = span[index * size - begin : (index + 1) * size - begin]
                self._compare(index, (block,))
                held[index] = block
                if len(span) <= _MAX_SPAN_BYTES:
                    _block_cache.put((self, index), bytes(block))
        content = b"".join(held[index] for index in wanted)  # type: ignore[misc]  # none is missing now
        return content[start - wanted[0] * size : stop - wanted[0] * size]

    def _ahead_bytes(self) -> int:
        """Return the minimum request size (bytes), which grows as column scans read from many row groups."""
        self._num_requests += 1
        doublings = min(self._num_requests - _EXACT_REQUESTS, 20)
        return 0 if doublings <= 0 else min(self._block_bytes << doublings, _MAX_AHEAD_BYTES)

    def _read_tail(self) -> bytes:
        if self._end == self.num_bytes:
            return b""
        tail = self._fetch(self._end, self.num_bytes)
        if short_hash(tail) != self._tail_hash:
            where = self.store.shown(self.relative)
            raise damaged(f"{where}: its last {len(tail):,} bytes have changed since they were first read")
        return tail

    def _fetch(self, start: int, stop: int) -> bytes:
        where = self.store.shown(self.relative)
        try:
            content = self.store.read_range(self.relative, start, stop)
        except FileNotFoundError as error:
            raise self._disappeared() from error
        except OSError as error:
            raise unreadable(where, error) from error
        if len(content) != stop - start:
            raise damaged(f"{where} ends at byte {start + len(content):,} of {self.num_bytes:,}")
        return content

    def _compare(self, index: int, parts: tuple[Bytes, ...]) -> None:
        blocks, digest = self._blocks, xxhash.xxh3_64()
        for part in parts if blocks is not None else ():
            digest.update(part)
        if blocks is not None and digest.digest() != blocks[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]:
            begin = index * self._block_bytes
            raise DamagedTrace(
                f"{self.store.shown(self.relative)} is damaged between bytes {begin:,} and "
                f"{begin + sum(map(len, parts)):,} (checksum mismatch). Restore it from a backup, or "
                "move it elsewhere to use the rest of the trace"
            )
        with self._lock:
            self._seen[index] = 1


class _BlockCache:
    def __init__(self) -> None:
        self._blocks: OrderedDict[tuple[VerifiedFile, int], bytes] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def get(self, key: tuple[VerifiedFile, int]) -> Bytes | None:
        with self._lock:
            if key in self._blocks:
                self._blocks.move_to_end(key)
            return self._blocks.get(key)

    def put(self, key: tuple[VerifiedFile, int], block: bytes) -> None:
        with self._lock:
            if key not in self._blocks:
                self._blocks[key] = block
                self._num_bytes += len(block)
            while self._num_bytes > _CACHE_BYTES:
                self._num_bytes -= len(self._blocks.popitem(last=False)[1])


_block_cache = _BlockCache()


class FileCursor(threading.local):
    """Presents a VerifiedFile as a file to DuckDB and Arrow. Each thread has its own position."""

    def __init__(self, file: VerifiedFile):
        self._file = file
        self._position = 0
        self.closed = False
        self.mode = "rb"

    @property
    def size(self) -> int:
        return self._file.shown_bytes

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = offset + (0, self._position, self.size)[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int = -1) -> bytes:
        stop = self.size if size < 0 else min(self._position + size, self.size)
        content = self._file.read_shown(self._position, stop)
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
