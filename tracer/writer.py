"""One process's part in a trace: its thread, its files, its state, and how recording ends when something breaks."""

from __future__ import annotations

import os
import socket
import sys
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from ..schemas.clock import now
from ..schemas.contract import Contract, canonical_json, contract_hash
from ..schemas.errors import InvalidRecord
from ..schemas.layout import JOURNAL, PASSES, TEMPORARY_PREFIX, WRITERS
from ..schemas.writer_state import CLOSED, FAILED, WriterState
from . import environment
from .segments import SegmentWriter
from .store import write_whole
from .weights.writer import WeightWriter
from .worker import Worker

QUEUE_BYTES = 128 << 20
"""What may wait for the disk before the training thread does."""
RESERVE_BYTES = 64 << 10
"""Kept free for the note that the disk is full."""


class TraceWriter:
    """Writes to a trace from a thread of its own.

    An error of the disk or of ours ends the recording and not the training: it is told on stderr, the writer's state
    becomes `failed`, and everything that comes later is discarded.
    """

    def __init__(self, folder: Path, *, queue_bytes: int = QUEUE_BYTES, hooks: dict[str, str] | None = None):
        self.folder = folder
        rank = environment.rank()
        self.name = f"{'p' if rank is None else f'r{rank}-p'}{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self.state = WriterState(
            writer=self.name,
            host=socket.gethostname(),
            pid=os.getpid(),
            rank=rank,
            opened_at=now(),
            program=environment.program(),
            hooks=hooks or {},
        )
        self.segments = SegmentWriter(folder, self.name)
        self._reserve = folder / JOURNAL / f"{TEMPORARY_PREFIX}reserve-{self.name}"
        self._weights: WeightWriter | None = None
        self._contracts: set[tuple[str, str]] = set()
        self._invalid: InvalidRecord | None = None
        self._reserve.parent.mkdir(parents=True, exist_ok=True)
        self._reserve.write_bytes(b"\0" * RESERVE_BYTES)
        self.save_state()
        self._worker = Worker(queue_bytes)
        self.submit(self._note_versions, 0)

    @property
    def is_open(self) -> bool:
        """Whether what is submitted is still recorded."""
        return self.state.state not in (CLOSED, FAILED)

    def submit(self, task: Callable[[], None], num_bytes: int) -> None:
        """Run a task on the writing thread; wait first when too much is queued.

        Raises InvalidRecord when a task before it met values that contradict each other.
        """
        if self.state.pid != os.getpid():
            raise InvalidRecord(
                f"writer {self.name} belongs to process {self.state.pid}; open a recorder in this process ({os.getpid()})"
            )
        self.raise_invalid()
        if self.is_open:
            self._worker.submit(lambda: self._run(task), num_bytes)

    def raise_invalid(self) -> None:
        """Raise what a task found wrong with its values, once."""
        if self._invalid is not None:
            error, self._invalid = self._invalid, None
            raise error

    def append(self, table: str, batch: pa.RecordBatch) -> None:
        """Append rows; on the writing thread."""
        self.segments.append(table, batch)

    def contract(self, pass_name: str, contract: Contract) -> str:
        """Keep a pass's contract, once, and return its hash."""
        digest = contract_hash(contract)
        if (pass_name, digest) not in self._contracts:
            self._contracts.add((pass_name, digest))
            text = canonical_json({"pass": pass_name, "contract_hash": digest, "contract": contract})
            path = self.folder / PASSES / pass_name / f"{digest}.json"
            self.submit(lambda: write_whole(path, text.encode()), 0)
        return digest

    def keep_weights(self, version: int, tensors: Mapping[str, Any]) -> None:
        """Keep a version of the weights (names of a state_dict -> tensors), once; the caller may change them then.

        Raises InvalidRecord for a dtype that cannot be kept.
        """
        if not self.is_open:
            return
        if self._weights is None:
            self._weights = WeightWriter(self.folder, self.name)
        self._weights.snapshot(version, tensors)
        if self._weights.error is not None:
            self.stop(self._weights.error)

    def drain(self) -> None:
        """Wait until everything submitted is in the journal."""
        self._worker.drain()

    def save_state(self) -> None:
        write_whole(self.folder / WRITERS / f"{self.name}.json", self.state.to_json().encode())

    def stop(self, error: BaseException) -> None:
        """End recording because of an error outside of the writing thread."""
        self._worker.submit(lambda: self._fail(error), 0)

    def _fail(self, error: BaseException) -> None:
        """End recording: say so, mark the trace, and discard what comes later; on the writing thread."""
        if not self.is_open:
            return
        self.state.state = FAILED
        self.state.error = f"{type(error).__name__}: {error}"
        print(
            f"tim-trace: RECORDING STOPPED in process {self.state.pid}, training goes on: {self.state.error}\n"
            f"tim-trace: what was recorded before is readable: tim-trace info {self.folder}",
            file=sys.stderr,
            flush=True,
        )
        self.segments.abandon()
        self._end()

    def close(self, *, at_exit: bool = False) -> None:
        """Write what is queued, seal it, and mark the writer closed; does nothing in a forked child.

        At the exit of the interpreter distributions stay in the journal: Zarr starts threads, which is too late then.
        Readers take them from there, and `tim-trace record` seals them.
        """
        if self.state.pid != os.getpid():
            return
        if self.is_open:
            close = partial(self.segments.close, distributions=not at_exit)
            self._worker.submit(lambda: self._run(close), 0)
        if self._weights is not None:
            self._weights.close()
            if self._weights.error is not None:
                self.stop(self._weights.error)
        self._worker.close()
        if self.is_open:
            self.state.state = CLOSED
            self._end()

    def _run(self, task: Callable[[], None]) -> None:
        if not self.is_open:
            return
        try:
            task()
            self.segments.seal_when_full()
        except InvalidRecord as error:
            self._invalid = error
        except BaseException as error:
            self._fail(error)

    def _end(self) -> None:
        self._reserve.unlink(missing_ok=True)
        self.state.closed_at = now()
        self.state.waited_s = self._worker.waited_s + (self._weights.waited_s if self._weights else 0.0)
        try:
            self.save_state()
        except OSError as error:
            print(f"tim-trace: the trace could not be marked ({error})", file=sys.stderr, flush=True)

    def _note_versions(self) -> None:
        self.state.versions = environment.all_versions()
        self.save_state()
