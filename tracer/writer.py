"""A process's writer: its thread, files and state, and how recording ends after an error."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ..schemas.checksums import SealedFile, sealed
from ..schemas.documents import CLOSED, FAILED, Contract, WriterState, canonical_json, contract_hash, now
from ..schemas.errors import ImportFailed, InvalidRecord, StorageStalled
from ..schemas.layout import DENSE, JOURNAL, MANIFEST, PASSES, RESERVE_PREFIX, TOKENIZER, WEIGHTS, WRITERS
from . import environment
from .liveness import HEARTBEAT_S, Attempt, this_process, writer_prefix
from .patience import Patience, say
from .rows import BUILDERS
from .segments import SegmentWriter
from .store import Store
from .weights.writer import WeightWriter
from .whole_file import check_inside, sync, trace_file, write_part
from .worker import Worker, run_within

_T = TypeVar("_T")

QUEUE_BYTES = 128 << 20
"""Training waits while more bytes than this are queued."""
QUEUE_S = 1.0
"""Training waits while the oldest queued data is older than this (seconds)."""
RESERVE_BYTES = 64 << 10
"""Disk space (bytes) set aside so that a full disk can still be reported in the writer's state."""


class Part(StrEnum):
    """Optional parts of a recording. An error in one part ends only that part, not the recording."""

    METRICS = "metrics"
    OPTIMIZER = "optimizer statistics"
    WEIGHTS = "weights"
    ENGINE_WEIGHTS = "the engine's weights"
    TEXTS = "the tokenizer and hyperparameters"
    CONTRACTS = "contracts"
    REWARDS = "rewards"
    DISTRIBUTIONS = "the trainer's distributions"
    ROUTING = "router choices"


class TraceWriter:
    """Writes to a trace from its own thread, and lists every finished file in its state.

    Disk errors and bugs end the recording, not the training: they are reported on stderr, the state becomes `failed`,
    and later records are discarded. If the file system does not respond for `max_wait_s`, the thread is also abandoned.
    """

    def __init__(
        self, folder: Path, *, queue_bytes: int = QUEUE_BYTES, hooks: dict[str, str] | None = None,
        attempt: Attempt | None = None, journals: bool = True, max_wait_s: float = math.inf,
    ):  # fmt: skip
        """If `journals` is False, as in imports, unsealed rows are kept in memory and lost if the process is killed."""
        self.folder = folder
        rank = environment.rank()
        self.name = f"{writer_prefix(rank)}{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self.state = WriterState(
            writer=self.name, run_id=Store(folder).manifest().run_id, **this_process(), rank=rank,
            attempt=None if attempt is None else attempt.number, attempt_key=None if attempt is None else attempt.key,
            opened_at=now(), program=environment.program(), hooks=hooks or {},
            versions=environment.all_versions() if journals else {},
        )  # fmt: skip
        self.segments = SegmentWriter(folder, self.name, self.account, journals=journals)
        self._journals = journals
        self._failure: BaseException | None = None
        self._saving = threading.RLock()
        self._reserve = folder / JOURNAL / f"{RESERVE_PREFIX}{self.name}"
        self._weights: WeightWriter | None = None
        self._contracts: set[tuple[str, str]] = set()
        self._synced: set[Path] = set()
        self._invalid: InvalidRecord | None = None
        self._ended_parts: set[str] = set()
        self.patience = Patience(folder, max_wait_s, meanwhile=self._save_beside)
        self.has_stalled = False
        self._beside: threading.Thread | None = None
        """Thread that saves the state while the writing thread cannot."""
        if journals:
            check_inside(folder, f"{JOURNAL}/{self._reserve.name}")
            self._reserve.parent.mkdir(parents=True, exist_ok=True)
            self._reserve.write_bytes(b"\0" * RESERVE_BYTES)
        self.save_state()
        self._worker = Worker(
            queue_bytes, max_wait_s=QUEUE_S, patience=self.patience, is_behind=lambda: self.segments.is_behind,
            idle=self._heartbeat, idle_s=HEARTBEAT_S,
        )  # fmt: skip

    @property
    def is_open(self) -> bool:
        return self.state.state not in (CLOSED, FAILED)

    def submit(self, task: Callable[[], None], num_bytes: int, *, ready: Callable[[], None] | None = None) -> None:
        """Queue a task for the writing thread. If an earlier task raised InvalidRecord, raise it here."""
        if self.state.pid != os.getpid():
            raise InvalidRecord(
                f"writer {self.name} belongs to process {self.state.pid}. Open a recorder in this process ({os.getpid()})"
            )
        self.raise_invalid()
        if self.is_open:
            with self._bounded():
                self._worker.submit(lambda: self._run(task), num_bytes, ready=ready)

    def raise_invalid(self) -> None:
        if self._invalid is not None:
            error, self._invalid = self._invalid, None
            raise error

    def part(self, part: Part, function: Callable[..., _T], *args: Any, **kwargs: Any) -> _T | None:
        """Call a function that records `part` and return its result. After an error, end the part and return None."""
        if part in self._ended_parts:
            return None
        try:
            with self._bounded():
                return function(*args, **kwargs)
        except InvalidRecord:
            raise
        except Exception as error:
            self.end(part, error)
        return None

    def end(self, part: Part, error: BaseException) -> None:
        if part in self._ended_parts:
            return
        self._ended_parts.add(part)
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        say(f"no longer recorded: {part} ({reason}). Everything else continues")
        self.note(f"{part}, after an error ({reason})")

    def note(self, sentence: str) -> None:
        self.state.not_recorded += (sentence,)
        self.submit(self.save_state, 0)

    def append(self, table: str, columns: Mapping[str, Any], rows: int) -> None:
        """Append rows, given as columns (see RowBuilder). Call this on the writing thread."""
        known = {"attempt": self.state.attempt, "writer": self.name}
        self.segments.append(table, BUILDERS[table].batch(known | dict(columns), rows))

    def contract(self, pass_name: str, contract: Contract) -> str:
        digest = contract_hash(contract)
        if (pass_name, digest) not in self._contracts:
            self._contracts.add((pass_name, digest))
            content = canonical_json({"pass": pass_name, "contract_hash": digest, "contract": contract}).encode()
            relative = f"{PASSES}/{pass_name}/{digest}.json"
            self.submit(lambda: self._keep(relative, content), 0)
        return digest

    def keep_weights(self, version: int, tensors: Mapping[str, Any]) -> None:
        if self.is_open:
            self.part(Part.WEIGHTS, self._keep_weights, version, tensors)

    def _keep_weights(self, version: int, tensors: Mapping[str, Any]) -> None:
        if self._weights is None:
            self._weights = WeightWriter(
                self.folder, self.name, partial(self.account, saves=False), patience=self.patience
            )
        with self._bounded():
            self._weights.snapshot(version, tensors)
        self._check_weights()

    def save_tokenizer(self, tokenizer: Any) -> None:
        if self.is_open:
            with self._bounded():
                run_within(self.patience, partial(self._keep_tokenizer, tokenizer))
            self.submit(self.save_state, 0)

    def _keep_tokenizer(self, tokenizer: Any) -> None:
        if (self.folder / TOKENIZER).exists():
            return
        with trace_file(self.folder, TOKENIZER) as temporary:
            tokenizer.save_pretrained(temporary)
            files = {path.relative_to(temporary): path for path in temporary.rglob("*") if path.is_file()}
            account = {f"{TOKENIZER}/{name.as_posix()}": sealed(path.read_bytes()) for name, path in files.items()}
        self.account(account, saves=False)

    def flush(self, *, sync: bool, weights: bool = True) -> bool:
        """Wait until everything submitted is written. Returns False if recording has stopped."""
        with self._bounded():
            if weights and self._weights is not None:
                self._weights.drain()
                self._check_weights()
            self.submit(partial(self._sync, weights=weights) if sync else self.save_state, 0)
            self._worker.drain()
        self.raise_invalid()
        return self._is_whole()

    def account(
        self, files: Mapping[str, SealedFile] | None = None, *, begun: str | None = None,
        ended: str | None = None, saves: bool = True, sync: bool = False,
    ) -> None:  # fmt: skip
        """Add `files` and the new journal `begun` to the state, and remove the sealed journal `ended`."""
        with self._saving:
            self.state.files |= files or {}
            begins = () if begun is None else (begun,)
            self.state.journals = (*(name for name in self.state.journals if name != ended), *begins)
            if saves and self._journals:
                self.save_state()
        if sync:
            self._sync_files(files or ())

    def save_state(self) -> None:
        with self._saving:
            self.state.waited_s = self.patience.waited_s
            write_part(self.folder, f"{WRITERS}/{self.name}.json", self.state.to_json().encode())

    def stop(self, error: BaseException) -> None:
        with self._bounded():
            self._worker.submit(lambda: self._fail(error), 0)

    def close(self, *, at_exit: bool = False) -> bool:
        """Write and seal queued records, and mark the writer closed. No effect in a forked child.

        At interpreter exit, distributions stay in the journal, because Zarr can no longer start threads. Returns False
        if recording has stopped.
        """
        if self.state.pid != os.getpid():
            return True
        with self._bounded():
            if self.is_open:
                close = partial(self.segments.close, distributions=not at_exit)
                self._worker.submit(lambda: self._run(close), 0)
            if self._weights is not None:
                self._weights.close(signs=self._progress_signs)
                self._check_weights()
            self._worker.submit(lambda: self._run(self._finish), 0)
            self._worker.close(signs=self._progress_signs)
        return self._is_whole()

    def check(self, where: str) -> None:
        if self.state.state == FAILED:
            reason = " ".join(str(self.state.error).split())
            raise ImportFailed(f"{where} could not be written ({reason})") from self._failure

    @contextlib.contextmanager
    def _bounded(self) -> Iterator[None]:
        try:
            yield
        except StorageStalled as error:
            self._give_up(error)

    def _progress_signs(self) -> tuple[Any, ...]:
        return self._worker.signs, self.segments.signs, self._weights and self._weights.signs

    def _check_weights(self) -> None:
        if self._weights is not None and self._weights.error is not None:
            self.end(Part.WEIGHTS, self._weights.error)

    def _is_whole(self) -> bool:
        if self.state.state != FAILED or not self._journals:
            return self.state.state != FAILED
        say(f"process {self.state.pid} stopped recording earlier: {self.state.error}")
        return False

    @property
    def _state_path(self) -> Path:
        return self.folder / WRITERS / f"{self.name}.json"

    def _keep(self, relative: str, content: bytes) -> None:
        write_part(self.folder, relative, content)
        self.account({relative: sealed(content)})

    def _sync(self, *, weights: bool) -> None:
        self.segments.sync()
        with self._saving:
            self.save_state()
            names = set(self.state.files)
            journals = self.state.journals
        trees = (self.folder / WEIGHTS).glob(f"{self.name}-*") if weights else ()
        below = [str(path.relative_to(self.folder)) for tree in trees for path in tree.rglob("*") if path.is_file()]
        self._sync_files((MANIFEST, *names, *below), beside=journals)

    def _sync_files(self, names: Iterable[str], *, beside: Iterable[str] = ()) -> None:
        paths = {self.folder / name for name in names} - self._synced
        groups = [path.parent for path in paths if path.parent.parent == self.folder / DENSE]
        files = {*paths, self._state_path, *(path for group in groups for path in group.rglob("*") if path.is_file())}
        for path in files:
            with contextlib.suppress(FileNotFoundError):  # the file has been merged into another one
                sync(path)
        places = (*files, *(self.folder / name for name in beside))
        inside = {above for path in places for above in path.parents if self.folder in above.parents}
        for above in (*inside, self.folder, self.folder.parent):
            sync(above)
        self._synced |= paths

    def _fail(self, error: BaseException) -> None:
        """Report an error and discard later records. Called on the writing thread."""
        if not self.is_open:
            return
        self._failure = error
        if not self._journals:
            self.state.state, self.state.error = FAILED, f"{type(error).__name__}: {error}"
            self.segments.abandon()
            return
        self._say_stopped(error)
        there = self._state_path.parent.exists()
        readable = f"earlier records are readable: tim-trace info {self.folder}"
        say(readable if there else f"{self.folder} was removed, along with all records of this process")
        self.segments.abandon()
        if there:
            self._end()

    def _give_up(self, error: StorageStalled) -> None:
        if self.state.state != FAILED:
            self.has_stalled = True
            self._say_stopped(error)
        self._worker.abandon(self._finish_abandoned)
        if self._weights is not None:
            self._weights.abandon()
        self._save_beside()

    def _finish_abandoned(self) -> None:
        self.segments.abandon()
        self._end()

    def _say_stopped(self, error: BaseException) -> None:
        self.state.state, self.state.error = FAILED, f"{type(error).__name__}: {error}"
        say(f"RECORDING STOPPED in process {self.state.pid}, training continues: {self.state.error}")

    def _save_beside(self) -> None:
        def save() -> None:
            with contextlib.suppress(OSError):
                self.save_state()

        if self.state.state == FAILED or self._beside is None or not self._beside.is_alive():
            self._beside = threading.Thread(target=save, name="tim-trace", daemon=True)
            with contextlib.suppress(RuntimeError):  # no thread can start while the interpreter shuts down
                self._beside.start()

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

    def _finish(self) -> None:
        self.state.state = CLOSED
        self._end()

    def _end(self) -> None:
        with contextlib.suppress(OSError):
            self._reserve.unlink()
        self.state.closed_at = now()
        of_weights = self._weights.cpu_s if self._weights else 0.0
        self.state.cpu_s = (self.state.cpu_s or 0.0) + self._worker.cpu_s + self.segments.cpu_s + of_weights
        try:
            self.save_state()
        except OSError as error:
            say(f"the trace could not be marked as {self.state.state} ({error})")

    def _heartbeat(self) -> None:
        with contextlib.suppress(OSError):
            os.utime(self._state_path)
