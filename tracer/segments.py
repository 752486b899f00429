from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ..schemas.layout import SCORES, Segment
from ..schemas.tables import TABLES
from . import dense
from .journal import DENSE_SCHEMA, DENSE_TABLE, JournalStream
from .seal import seal_rows, seal_table
from .worker import Worker

SEAL_BYTES = 64 << 20
"""Journal size that triggers sealing (bytes): about four million tokens with ids and the logprobs of three passes."""


class HeldRows:
    """Like JournalStream, but keeps record batches in memory instead of in a file."""

    is_synced = False

    def __init__(self) -> None:
        self.batches: list[pa.RecordBatch] = []
        self.num_bytes = 0

    def append(self, batch: pa.RecordBatch) -> None:
        batch.validate(full=True)
        self.batches.append(batch)
        self.num_bytes += batch.nbytes

    def sync(self) -> None:
        pass

    def close(self) -> None:
        pass


_Stream = JournalStream | HeldRows


class SegmentWriter:
    """Appends one writer's rows and distributions. Not thread-safe.

    A segment is sealed while the next one is being filled. One thread seals scores and another seals all other tables.
    Both threads call `account`.
    """

    def __init__(self, folder: Path, writer: str, account: Callable[..., None], *, journals: bool = True):
        """`account` is `TraceWriter.account`. If `journals` is False, rows stay in memory until sealed."""
        self.folder = folder
        self.seal_bytes = SEAL_BYTES
        self._account = account
        self._journals = journals
        self.segment = Segment(writer, 0)
        self._streams: dict[str, _Stream] = {}
        self._num_bytes = 0
        self._dense_rows: dict[str, int] = {}
        self._sealing: dict[str, _Stream] = {}
        """Streams being sealed, by journal path. Changed only under `_handover`, so that `sync` misses no rows."""
        self._handover = threading.Lock()
        self._sealers = {True: Worker(max_bytes=0), False: Worker(max_bytes=0)}

    def append(self, table: str, batch: pa.RecordBatch) -> None:
        self._stream(table).append(batch)

    def append_dense(self, pass_name: str, arrays: dict[str, tuple[np.ndarray, str]]) -> tuple[str, int]:
        group = f"{self.segment.name}/{pass_name}"
        start = self._dense_rows.get(group, 0)
        for name, (values, dtype) in arrays.items():
            batch = dense.block(group, name, start, values, dtype)
            self._stream(DENSE_TABLE).append(batch)
            self._dense_rows[group] = start + len(values)
        return group, start

    @property
    def cpu_s(self) -> float:
        return sum(sealer.cpu_s for sealer in self._sealers.values())

    @property
    def signs(self) -> list[Any]:
        return [sealer.signs for sealer in self._sealers.values()]

    @property
    def is_behind(self) -> bool:
        """True if the journal is full while the previous segment is still being sealed. Thread-safe."""
        return self._num_bytes >= self.seal_bytes and self._is_sealing

    @property
    def _is_sealing(self) -> bool:
        return any(sealer.is_busy for sealer in self._sealers.values())

    def seal_when_full(self) -> None:
        """Seal the current segment if it is full. Call this between groups of related records."""
        self._num_bytes = sum(stream.num_bytes for stream in self._streams.values())
        if self._num_bytes >= self.seal_bytes and not self._is_sealing:
            self.seal()

    def seal(self, *, distributions: bool = True) -> None:
        """Wait until the previous segment is sealed, then seal the current one in the background."""
        if self._streams:
            streams, segment = self._streams, self.segment
            self._close_streams()
            if not distributions:
                streams = {table: stream for table, stream in streams.items() if table != DENSE_TABLE}
            with self._handover:
                self._sealing |= {segment.journal(table): stream for table, stream in streams.items()}
            for is_scores, sealer in self._sealers.items():
                mine = {table: stream for table, stream in streams.items() if (table == SCORES) == is_scores}
                sealer.submit(partial(self._seal_tables, segment, mine), 1)
            self.segment = Segment(segment.writer, segment.number + 1)
            self._num_bytes = 0
            self._dense_rows = {}
        self._raise_sealing()

    def close(self, *, distributions: bool = True) -> None:
        self.seal(distributions=distributions)
        self._end_sealers()
        self._raise_sealing()

    def abandon(self) -> None:
        try:
            self._close_streams()
        except (OSError, pa.ArrowException):
            self._streams = {}
        self._end_sealers()

    def _end_sealers(self) -> None:
        for sealer in self._sealers.values():
            sealer.close()

    def _raise_sealing(self) -> None:
        for sealer in self._sealers.values():
            if sealer.error is not None:
                raise sealer.error

    def _stream(self, table: str) -> _Stream:
        if table not in self._streams and not self._journals:
            self._streams[table] = HeldRows()
        elif table not in self._streams:
            schema = DENSE_SCHEMA if table == DENSE_TABLE else TABLES[table].schema
            self._streams[table] = JournalStream(self.folder, self.segment, table, schema)
            self._account(begun=self.segment.journal(table))
        return self._streams[table]

    def sync(self) -> None:
        for stream in self._streams.values():
            stream.sync()
        with self._handover:
            for stream in self._sealing.values():
                stream.sync()

    def _close_streams(self) -> None:
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.close()

    def _seal_tables(self, segment: Segment, streams: dict[str, _Stream]) -> None:
        for table, stream in streams.items():
            journal = segment.journal(table)
            if isinstance(stream, HeldRows):
                files = seal_rows(self.folder, segment, table, stream.batches)
            else:
                files = seal_table(self.folder, segment, table)
            with self._handover:
                self._account(files, ended=journal, sync=stream.is_synced)
                if not isinstance(stream, HeldRows):
                    (self.folder / journal).unlink()
                del self._sealing[journal]
