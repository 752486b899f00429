"""The thread that writes, and the bounded queue in front of it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

Task = Callable[[], None]


class Worker:
    """Runs tasks in order on a thread of its own.

    The queue holds at most `max_bytes` of what the tasks keep alive; a full one makes the caller wait, and the wait
    is counted. Nothing is dropped. After a task raised, the rest are discarded and `error` holds the reason.
    """

    def __init__(self, max_bytes: int):
        self.max_bytes = max_bytes
        self.waited_s = 0.0
        self.error: BaseException | None = None
        self._tasks: deque[tuple[Task, int]] = deque()
        self._queued_bytes = 0
        self._busy = False
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="tim-trace", daemon=True)
        self._thread.start()

    def submit(self, task: Task, num_bytes: int) -> None:
        """Queue a task; wait first while the queue is full. A task larger than the queue goes in alone."""
        with self._changed:
            if self._full(num_bytes):
                begin = time.monotonic()
                while self._full(num_bytes):
                    self._changed.wait()
                self.waited_s += time.monotonic() - begin
            if self.error is None:
                self._tasks.append((task, num_bytes))
                self._queued_bytes += num_bytes
                self._changed.notify_all()

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
        pending = bool(self._tasks) or self._busy
        return self.error is None and pending and self._queued_bytes + num_bytes > self.max_bytes

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._tasks and not self._closing:
                    self._changed.wait()
                if not self._tasks:
                    return
                task, num_bytes = self._tasks.popleft()
                self._busy = True
            try:
                task()
            except BaseException as error:  # the training thread goes on whatever happened here
                self._fail(error)
            del task
            with self._changed:
                self._queued_bytes -= num_bytes
                self._busy = False
                self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            if self.error is None:
                self.error = error
            self._queued_bytes -= sum(num_bytes for _, num_bytes in self._tasks)
            self._tasks.clear()
