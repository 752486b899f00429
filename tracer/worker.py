from __future__ import annotations

import contextlib
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ..schemas.errors import StorageStalled
from .patience import Patience

Task = Callable[[], Any]
_Given = TypeVar("_Given")

_TASK_BYTES = 16 << 10
"""Fixed cost of a task, expressed as the number of bytes that could be written in the same time."""
_REMEMBERED_S = 0.5
"""Time constant of the running average of throughput (seconds of work)."""
_FIRST_PACE = 64 << 20
"""Assumed throughput (bytes per second) before any task has finished."""
_SHARE = 0.75
"""Fraction of the maximum wait that queued work may take. It is below 1, because task durations vary."""
_LOOKS_EVERY_S = 0.01
"""Seconds between a waiting caller's checks of `is_behind`."""


class Worker:
    """Runs tasks in order on a separate thread.

    The queue is full if a new task would exceed `max_bytes`, or if the queued tasks are expected to take most of
    `max_wait_s` at the recent pace. Callers wait while the queue is full or `is_behind` returns True, and `patience`
    limits and counts these waits. If a task raises, the remaining tasks are discarded and `error` holds the exception.
    `idle` is called after every `idle_s` seconds without a task.
    """

    def __init__(
        self, max_bytes: int, *, max_wait_s: float = math.inf, patience: Patience | None = None,
        is_behind: Callable[[], bool] | None = None, idle: Task | None = None, idle_s: float | None = None,
    ):  # fmt: skip
        self.max_bytes, self.max_wait_s = max_bytes, max_wait_s
        self.patience = Patience() if patience is None else patience
        self.error: BaseException | None = None
        self._is_behind = is_behind
        self._idle, self._idle_s = idle, idle_s
        self._tasks: deque[tuple[Task, int, float, Task | None]] = deque()
        self._queued_bytes = 0
        self._pace = _Pace()
        self._cpu_s, self._num_done = 0.0, 0
        self._busy = self._awaits_device = False
        self._device_at = 0.0
        """When the worker last finished waiting for a device."""
        self._closing = self._has_ended = self._is_abandoned = False
        self._changed = threading.Condition()
        self._running = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="tim-trace", daemon=True)
        self._thread.start()
        _workers.add(self)

    def submit(self, task: Task, num_bytes: int, *, ready: Task | None = None) -> None:
        """Queue a task. The worker first calls `ready` to wait for a device. That wait does not count as disk time."""
        with self._changed:
            if self._full(num_bytes):
                self._wait(
                    lambda: self._full(num_bytes), every_s=math.inf if self._is_behind is None else _LOOKS_EVERY_S
                )
            if self.error is None and not self._closing:
                self._tasks.append((task, num_bytes, time.monotonic(), ready))
                self._queued_bytes += num_bytes
                self._changed.notify_all()

    @property
    def cpu_s(self) -> float:
        return time.thread_time() if threading.current_thread() is self._thread else self._cpu_s

    @property
    def is_busy(self) -> bool:
        with self._changed:
            return bool(self._tasks) or self._busy

    @property
    def signs(self) -> tuple[int, list[str]]:
        """Values that change while the thread makes progress: finished tasks and CPU times."""
        task = Path(f"/proc/self/task/{self._thread.native_id}")
        # schedstat counts CPU time in nanoseconds. Fall back to stat on kernels that lack it.
        for name, times in (("schedstat", slice(1)), ("stat", slice(11, 13))):
            with contextlib.suppress(OSError):
                return self._num_done, (task / name).read_text(errors="replace").rpartition(")")[2].split()[times]
        return self._num_done, []

    def drain(self, *, signs: Callable[[], Any] | None = None) -> None:
        with self._changed:
            self._wait(lambda: (bool(self._tasks) or self._busy) and not self._is_abandoned, signs=signs)

    def result(self, call: Callable[[], _Given]) -> _Given:
        given: list[_Given] = []
        self.submit(lambda: given.append(call()), 0)
        self.drain(signs=lambda: self.signs)
        if self.error is not None:
            raise self.error
        return given[0]

    def close(self, *, signs: Callable[[], Any] | None = None) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            self._wait(lambda: not (self._has_ended or self._is_abandoned), signs=signs, counts=False)
        if not self._is_abandoned:
            self._thread.join()

    def abandon(self, last: Task | None = None) -> None:
        """Drop all queued tasks. `last` runs after the current task, if that ever ends."""
        with self._changed:
            self._fail(StorageStalled("abandoned"))
            self._closing = self._is_abandoned = True
            if last is not None:
                self._tasks.append((last, 0, 0.0, None))
            self._changed.notify_all()
        _workers.discard(self)

    def _wait(self, is_blocked: Callable[[], bool], **options: Any) -> None:
        self.patience.wait(self._changed, is_blocked, is_excused=lambda: self._awaits_device, **options)

    def _full(self, num_bytes: int) -> bool:
        if self.error is not None or self._closing:
            return False
        if self._is_behind is not None and self._is_behind():
            return True
        pending = bool(self._tasks) or self._busy
        return pending and (self._is_late() or self._queued_bytes + num_bytes > self.max_bytes)

    def _is_late(self) -> bool:
        if not self._tasks or self._awaits_device:
            return False
        expected_s = self._pace.expected_s(len(self._tasks), self._queued_bytes)
        since = max(self._tasks[0][2], self._device_at)
        return time.monotonic() - since > self.max_wait_s or expected_s > _SHARE * self.max_wait_s

    def _run(self) -> None:
        while True:
            with self._changed:
                woken = True
                while woken and not self._tasks and not self._closing:
                    woken = self._changed.wait(self._idle_s)
                if not self._tasks and self._closing:
                    self._has_ended = True
                    self._changed.notify_all()
                    return
                idle = self._idle or (lambda: None)
                task, num_bytes, _, ready = self._tasks.popleft() if self._tasks else (idle, 0, 0.0, None)
                self._busy, self._awaits_device = True, ready is not None
            begin = time.monotonic()
            try:
                with self._running:
                    if ready is not None:
                        begin = self._await_device(ready)
                    task()
            except BaseException as error:  # the training thread must continue
                self._fail(error)
            is_work = task is not self._idle
            del task, ready
            self._cpu_s = time.thread_time()
            with self._changed:
                self._pace.note(time.monotonic() - begin, num_bytes)
                self._queued_bytes -= num_bytes
                self._busy = False
                self._num_done += is_work
                self._changed.notify_all()

    def _await_device(self, ready: Task) -> float:
        try:
            ready()
        finally:
            with self._changed:
                self._awaits_device, self._device_at = False, time.monotonic()
                self._changed.notify_all()
        return self._device_at

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            if self.error is None:
                self.error = error
            self._queued_bytes -= sum(task[1] for task in self._tasks)
            self._tasks.clear()


def run_within(
    patience: Patience, call: Callable[[], _Given], *, late: Callable[[_Given], Any] = lambda _: None
) -> _Given:
    """Run a call on its own thread and return its result. `late` gets a result that arrives after StorageStalled."""
    given: list[_Given] = []
    worker = Worker(max_bytes=0, patience=patience)
    worker.submit(lambda: given.append(call()), 0)
    try:
        worker.drain()
    except BaseException:
        worker.abandon(lambda: None if not given else late(given[0]))
        raise
    worker.close()
    if worker.error is not None:
        raise worker.error
    return given[0]


class _Pace:
    def __init__(self) -> None:
        self._seconds, self._weight = _TASK_BYTES / _FIRST_PACE, float(_TASK_BYTES)

    def note(self, seconds: float, num_bytes: int) -> None:
        kept = math.exp(-seconds / _REMEMBERED_S)
        self._seconds = kept * self._seconds + seconds
        self._weight = kept * self._weight + num_bytes + _TASK_BYTES

    def expected_s(self, num_tasks: int, num_bytes: int) -> float:
        return self._seconds / self._weight * (num_bytes + num_tasks * _TASK_BYTES)


# If a task held a library's lock (e.g. Arrow's) during a fork, the child process could never release it. Forks
# therefore wait until no task is running.

_FORK_WAITS_S = 10.0
_workers: weakref.WeakSet[Worker] = weakref.WeakSet()
_paused: list[Worker] = []


def _pause_workers() -> None:
    for worker in list(_workers):
        own = worker._thread is threading.current_thread()
        if not own and worker._thread.is_alive() and worker._running.acquire(timeout=_FORK_WAITS_S):
            _paused.append(worker)


def _resume_workers() -> None:
    while _paused:
        _paused.pop()._running.release()


os.register_at_fork(before=_pause_workers, after_in_parent=_resume_workers, after_in_child=_paused.clear)
