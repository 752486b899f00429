"""Sending a trace to object storage while it is recorded, from a folder of the user's cache."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

from ..schemas.checksums import short_hash
from ..schemas.errors import StorageError, TraceExists
from .liveness import HEARTBEAT_S
from .patience import MAX_WAIT_S

_QUIET_S = 5.0
"""Seconds of waiting at the end before it says what it waits for."""


def cache_folder(url: str) -> Path:
    """Return the folder in which a recording to a URL is written before it is sent."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "tim-trace" / short_hash(url.encode()) / url.rstrip("/").rpartition("/")[2]


def forget(folder: str | os.PathLike[str], url: str) -> None:
    """Remove a folder that was sent to the URL, if it is the cache of a recording to this URL."""
    if Path(folder).resolve() == cache_folder(url).resolve():
        shutil.rmtree(cache_folder(url).parent, ignore_errors=True)


class Sender:
    """A trace that is recorded to a URL: the folder that it is written to first, and what was sent of it."""

    def __init__(self, url: str, *, max_wait: float = MAX_WAIT_S):
        """Raises TraceExists where something lies at the URL, or what an earlier recording could not send still lies here."""
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
        self._is_stuck = False
        self.folder.parent.mkdir(parents=True, exist_ok=True)

    @property
    def remedy(self) -> str:
        """The command that sends what was not sent."""
        return f"tim-trace compact {self.folder} -o {self.url}"

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Send what is sealed about once a minute, on a thread of its own. A failure is reported once, and tried again."""
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # each failed request would print a traceback
        ended = Event()
        thread = Thread(target=self._send_often, args=(ended,), name="sender", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            self._is_stuck = not self._joined(thread)

    def _send_often(self, ended: Event) -> None:
        has_reported = False
        while not ended.wait(HEARTBEAT_S):
            try:
                self._upload.send(tries=1)
                if self._upload.has_grown:
                    self._upload.send_index()
            except (StorageError, OSError) as error:
                if not has_reported:
                    self._print(f"{error}; recording goes on in {self.folder}, and is sent later")
                has_reported = True

    def finish(self) -> None:
        """Send all that is left, and remove the folder.

        Raises StorageError, and leaves the folder, if sending fails or nothing could be sent for `max_wait` seconds.
        """
        failed: list[Exception] = []

        def send() -> None:
            try:
                self._upload.send()
                self._upload.send_index()
            except Exception as error:  # raised again on the caller's thread
                failed.append(error)

        thread = Thread(target=send, name="sender", daemon=True)
        if not self._is_stuck:
            thread.start()
            self._is_stuck = not self._joined(thread)
        if self._is_stuck:
            failed = [StorageError(f"{self.url}: has taken nothing for {self._max_wait:.0f} s")]
        if failed and not isinstance(failed[0], (StorageError, OSError)):
            raise failed[0]
        if failed:
            raise StorageError(
                f"{failed[0]}; the whole trace lies in {self.folder}: send it with `{self.remedy}`"
            ) from failed[0]
        shutil.rmtree(self.folder.parent, ignore_errors=True)

    def _joined(self, thread: Thread) -> bool:
        """Wait for a thread that sends, at most `max_wait` seconds without a byte sent; return whether it ended."""
        start = moved = time.monotonic()
        num_bytes, has_reported = self._upload.num_bytes, False
        while thread.is_alive():
            thread.join(0.2)
            now = time.monotonic()
            if self._upload.num_bytes != num_bytes:
                num_bytes, moved = self._upload.num_bytes, now
            if now - moved > self._max_wait:
                return False
            if now - start > _QUIET_S and not has_reported:
                self._print(
                    f"sending the rest of the trace to {self.url}; gives up after {self._max_wait:.0f} s without progress"
                )
                has_reported = True
        return True

    def _print(self, message: str) -> None:
        print(f"tim-trace: {message}", file=sys.stderr, flush=True)
