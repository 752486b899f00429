"""The journal: what a writer recorded since it last sealed, as Arrow IPC streams that survive a killed process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from ..schemas.layout import JOURNAL, TABLES, Segment
from .store import Store

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
"""A block of `rows` rows of one array of a Zarr group, row-major, before it is sealed."""


class JournalStream:
    """Appends record batches of one table of one segment to a file.

    A batch counts as recorded once `append` returned: it is with the operating system then, and a killed process
    loses nothing of it.
    """

    def __init__(self, folder: Path, segment: Segment, table: str, schema: pa.Schema):
        self.path = folder / segment.journal(table)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "xb", buffering=0)  # noqa: SIM115  (open for as long as the segment)
        self.num_bytes = 0
        self._write(schema.serialize())

    def append(self, batch: pa.RecordBatch) -> None:
        self._write(batch.serialize())

    def close(self) -> None:
        """Mark the end of the stream."""
        try:
            self._write(_END_OF_STREAM)
        finally:
            self._file.close()

    def _write(self, message: pa.Buffer | bytes) -> None:
        """Hand a whole message to the operating system, in one call where it takes it so."""
        left = memoryview(message)
        while left:
            written = self._file.write(left)
            left = left[written:]
        self.num_bytes += len(memoryview(message))


_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalContent:
    """What one journal file holds."""

    batches: tuple[pa.RecordBatch, ...]
    torn_bytes: int
    """Bytes after the last whole record: a record that was being appended when the process died, or foreign bytes."""


def read_journal(store: Store, segment: Segment, table: str) -> JournalContent:
    """Read every whole record of a journal; a local file is mapped, not loaded.

    Raises FileNotFoundError when the segment has been sealed since.
    """
    relative = segment.journal(table)
    if store.is_local:
        source = pa.memory_map(store.path(relative)) if _has_bytes(store.path(relative)) else pa.BufferReader(b"")
    else:
        source = pa.BufferReader(store.read_bytes(relative))
    size = source.size()
    batches: list[pa.RecordBatch] = []
    whole = 0
    try:
        with pa.ipc.open_stream(source) as stream:
            whole = source.tell()
            while True:
                batches.append(stream.read_next_batch())
                whole = source.tell()
    except StopIteration:
        whole = max(whole, source.tell())
    except (pa.ArrowException, OSError):
        pass
    return JournalContent(batches=tuple(batches), torn_bytes=size - whole)


def _has_bytes(path: str) -> bool:
    return Path(path).stat().st_size > 0


def journaled_segments(store: Store) -> dict[Segment, tuple[str, ...]]:
    """Segments that are not sealed yet -> the tables that they have a journal of."""
    found: dict[Segment, list[str]] = {}
    for name in store.files(JOURNAL):
        stem, _, table = name.removesuffix(".arrows").rpartition(".")
        segment = Segment.parse(stem)
        if segment is not None and table in JOURNALED:
            found.setdefault(segment, []).append(table)
    return {segment: tuple(tables) for segment, tables in sorted(found.items())}
