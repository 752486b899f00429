"""The thread that writes, and the bounded queue in front of it."""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable

Task = Callable[[], None]

_TASK_BYTES = 16 << 10
"""Bytes that take as long as what every task has to do."""
_REMEMBERED_S = 0.5
"""Seconds of work by which the pace is judged."""
_FIRST_PACE = 64 << 20
"""Bytes a second, until tasks have shown theirs."""
_SHARE = 0.75
"""Share of the longest wait that the queue may be expected to take: tasks do not all take as long as the last ones."""
_LOOKS_EVERY_S = 0.01
"""How often a caller asks again whether others are still behind."""


class Worker:
    """Runs tasks in order on a thread of its own.

    The queue holds at most `max_bytes` of what the tasks keep alive, and no more of them than `max_wait_s` suffices for, at
    the pace of the last ones: a caller who comes while it is full, while its first task is older, or while `is_behind`
    says so, waits, and the wait is counted. Nothing is dropped. After a task raised, the rest are discarded and `error` holds
    the reason. `idle` is called every `idle_s` seconds in which there was nothing to do.
    """

    def __init__(
        self,
        max_bytes: int,
        *,
        max_wait_s: float = math.inf,
        is_behind: Callable[[], bool] | None = None,
        idle: Task | None = None,
        idle_s: float | None = None,
    ):
        self.max_bytes, self.max_wait_s = max_bytes, max_wait_s
        self.waited_s = 0.0
        self.cpu_s = 0.0
        """CPU time of its thread so far."""
        self.error: BaseException | None = None
        self._is_behind = is_behind
        self._idle, self._idle_s = idle, idle_s
        self._tasks: deque[tuple[Task, int, float]] = deque()
        self._queued_bytes = 0
        self._pace = _Pace()
        self._busy = False
        self._closing = False
        self._changed = threading.Condition()
        self._running = threading.Lock()
        """Held while a task runs."""
        self._thread = threading.Thread(target=self._run, name="tim-trace", daemon=True)
        self._thread.start()
        _workers.add(self)

    def submit(self, task: Task, num_bytes: int) -> None:
        """Queue a task; wait first while the queue is full. A task larger than the queue goes in alone."""
        with self._changed:
            if self._full(num_bytes):
                begin = time.monotonic()
                while self._full(num_bytes):
                    self._changed.wait(None if self._is_behind is None else _LOOKS_EVERY_S)
                self.waited_s += time.monotonic() - begin
            if self.error is None:
                self._tasks.append((task, num_bytes, time.monotonic()))
                self._queued_bytes += num_bytes
                self._changed.notify_all()

    @property
    def is_busy(self) -> bool:
        """Whether a task waits or runs."""
        with self._changed:
            return bool(self._tasks) or self._busy

    def drain(self) -> None:
        """Wait until every queued task ran."""
        with self._changed:
            while self._tasks or self._busy:
                self._changed.wait()

    def wait(self) -> None:
        """Wait until every queued task ran, and count the wait."""
        begin = time.monotonic()
        self.drain()
        self.waited_s += time.monotonic() - begin

    def close(self) -> None:
        """Run what is queued and end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _full(self, num_bytes: int) -> bool:
        if self.error is not None:
            return False
        if self._is_behind is not None and self._is_behind():
            return True
        pending = bool(self._tasks) or self._busy
        return pending and (self._is_late() or self._queued_bytes + num_bytes > self.max_bytes)

    def _is_late(self) -> bool:
        """Whether what waits waits for too long, or is about to."""
        if not self._tasks:
            return False
        expected_s = self._pace.expected_s(len(self._tasks), self._queued_bytes)
        return time.monotonic() - self._tasks[0][2] > self.max_wait_s or expected_s > _SHARE * self.max_wait_s

    def _run(self) -> None:
        while True:
            with self._changed:
                woken = True
                while woken and not self._tasks and not self._closing:
                    woken = self._changed.wait(self._idle_s)
                if not self._tasks and self._closing:
                    return
                task, num_bytes, _ = self._tasks.popleft() if self._tasks else (self._idle or _nothing, 0, 0.0)
                self._busy = True
            begin = time.monotonic()
            try:
                with self._running:
                    task()
            except BaseException as error:  # the training thread goes on whatever happened here
                self._fail(error)
            del task
            self.cpu_s = time.thread_time()
            with self._changed:
                self._pace.note(time.monotonic() - begin, num_bytes)
                self._queued_bytes -= num_bytes
                self._busy = False
                self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            if self.error is None:
                self.error = error
            self._queued_bytes -= sum(num_bytes for _, num_bytes, _ in self._tasks)
            self._tasks.clear()


def _nothing() -> None: ...


class _Pace:
    """How long tasks take, by the last ones."""

    def __init__(self) -> None:
        self._seconds, self._weight = _TASK_BYTES / _FIRST_PACE, float(_TASK_BYTES)

    def note(self, seconds: float, num_bytes: int) -> None:
        """Count a task that ran; what was before counts less, by the time that passed since."""
        kept = math.exp(-seconds / _REMEMBERED_S)
        self._seconds = kept * self._seconds + seconds
        self._weight = kept * self._weight + num_bytes + _TASK_BYTES

    def expected_s(self, num_tasks: int, num_bytes: int) -> float:
        """How long some tasks will take together."""
        return self._seconds / self._weight * (num_bytes + num_tasks * _TASK_BYTES)


# A child that is forked while a thread is inside of a library, such as Arrow, has that library's locks as they were, and
# nobody who will open them. So a fork waits until no task runs.

_FORK_WAITS_S = 10.0
_workers: weakref.WeakSet[Worker] = weakref.WeakSet()
_paused: list[Worker] = []


def _pause() -> None:
    for worker in list(_workers):
        own = worker._thread is threading.current_thread()
        if not own and worker._thread.is_alive() and worker._running.acquire(timeout=_FORK_WAITS_S):
            _paused.append(worker)


def _go_on() -> None:
    while _paused:
        _paused.pop()._running.release()


os.register_at_fork(before=_pause, after_in_parent=_go_on, after_in_child=_paused.clear)
