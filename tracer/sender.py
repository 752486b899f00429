"""Sending a trace to object storage while it is recorded, from a folder of the user's cache."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from typing import Any

from ..schemas.checksums import short_hash
from ..schemas.errors import StorageError, StorageStalled, TraceExists
from .liveness import HEARTBEAT_S
from .patience import MAX_WAIT_S, Patience
from .worker import Worker

_QUIET_S = 5.0
"""Seconds of waiting at the end before a message."""


def cache_folder(url: str) -> Path:
    """Return the folder in which a recording to a URL is written before it is sent."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "tim-trace" / short_hash(url.encode()) / url.rstrip("/").rpartition("/")[2]


def forget(folder: str | os.PathLike[str], url: str) -> None:
    """Remove a folder that was sent to the URL, if it is the cache of a recording to this URL."""
    if Path(folder).resolve() == cache_folder(url).resolve():
        shutil.rmtree(cache_folder(url).parent, ignore_errors=True)


class Sender:
    """Sends a trace that is recorded to a URL from the folder that it is written to first."""

    def __init__(self, url: str, *, max_wait: float = MAX_WAIT_S):
        """Raises TraceExists if the URL is in use, or if the cache folder still holds an earlier recording that was not sent."""
        from .upload import Upload  # here, so that a command starts before the file systems' libraries are loaded

        self.url, self._max_wait = url, max_wait
        self.folder = cache_folder(url)
        if self.folder.exists():
            raise TraceExists(
                f"{url}: an earlier recording that was not sent whole lies in {self.folder}; send it with `{self.remedy}`, "
                "or remove it"
            )
        self._upload = Upload(self.folder, url)
        self._upload.has_part_of()
        self._is_stuck = self._has_failed = False
        self.folder.parent.mkdir(parents=True, exist_ok=True)

    @property
    def remedy(self) -> str:
        """The command that sends what was not sent."""
        return f"tim-trace compact {self.folder} -o {self.url}"

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Send what is sealed about once a minute, on a thread of its own. A failure is reported once, and tried again."""
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # each failed request would print a traceback
        worker = self._worker(idle=self._send_sealed, idle_s=HEARTBEAT_S)
        try:
            yield
        finally:
            self._end(worker)

    def _worker(self, **options: Any) -> Worker:
        return Worker(max_bytes=0, patience=Patience("", self._max_wait), **options)

    def _end(self, worker: Worker) -> None:
        """Wait until a thread that sends has ended; no longer than `max_wait` seconds in which no byte is sent."""
        note = Timer(
            _QUIET_S,
            self._print,
            [f"sending the rest of the trace to {self.url}; gives up after {self._max_wait:.0f} s without progress"],
        )
        note.daemon = True
        note.start()
        try:
            worker.close(signs=lambda: self._upload.num_bytes)
        except StorageStalled:
            worker.abandon()
            self._is_stuck = True
        finally:
            note.cancel()

    def _send_sealed(self) -> None:
        try:
            self._upload.send(tries=1)
            if self._upload.has_grown:
                self._upload.send_index()
        except (StorageError, OSError) as error:
            if not self._has_failed:
                self._print(f"{error}; recording goes on in {self.folder}, and is sent later")
            self._has_failed = True

    def _send_all(self) -> None:
        self._upload.send()
        self._upload.send_index()

    def finish(self) -> None:
        """Send all that is left, and remove the folder.

        Raises StorageError, and leaves the folder, if sending fails or nothing could be sent for `max_wait` seconds.
        """
        error: BaseException | None = None
        if not self._is_stuck:
            worker = self._worker()
            worker.submit(self._send_all, 0)
            self._end(worker)
            error = worker.error
        if self._is_stuck:
            error = StorageError(f"{self.url}: has taken nothing for {self._max_wait:.0f} s")
        if isinstance(error, (StorageError, OSError)):
            raise StorageError(
                f"{error}; the whole trace lies in {self.folder}: send it with `{self.remedy}`"
            ) from error
        if error is not None:
            raise error
        shutil.rmtree(self.folder.parent, ignore_errors=True)

    def _print(self, message: str) -> None:
        print(f"tim-trace: {message}", file=sys.stderr, flush=True)
