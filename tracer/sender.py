"""Upload a trace to object storage during recording, from the user's cache folder."""

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
"""Time that the final upload may take before a message is printed, seconds."""


def cache_folder(url: str) -> Path:
    """Return the cache folder of a recording to a URL."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "tim-trace" / short_hash(url.encode()) / url.rstrip("/").rpartition("/")[2]


def forget(folder: str | os.PathLike[str], url: str) -> None:
    """Remove an uploaded folder if it is the cache folder of a recording to this URL."""
    if Path(folder).resolve() == cache_folder(url).resolve():
        shutil.rmtree(cache_folder(url).parent, ignore_errors=True)


class Sender:
    """Uploads a recording to a URL from its cache folder."""

    def __init__(self, url: str, *, max_wait: float = MAX_WAIT_S):
        """Raises TraceExists if the URL is in use, or if the cache folder still holds an earlier recording."""
        from .upload import Upload  # imported here, so that a command starts before file system libraries are loaded

        self.url, self._max_wait = url, max_wait
        self.folder = cache_folder(url)
        if self.folder.exists():
            raise TraceExists(
                f"{url}: an earlier recording was not uploaded completely and is in {self.folder}; upload it with `{self.remedy}`, "
                "or remove it"
            )
        self._upload = Upload(self.folder, url)
        self._upload.has_part_of()
        self._is_stuck = self._has_failed = False
        self.folder.parent.mkdir(parents=True, exist_ok=True)

    @property
    def remedy(self) -> str:
        """Shell command that uploads the files not uploaded yet."""
        return f"tim-trace compact {self.folder} -o {self.url}"

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Upload sealed files about once a minute on a separate thread. A failure is reported once and retried."""
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # each failed request would print a traceback
        worker = self._worker(idle=self._send_sealed, idle_s=HEARTBEAT_S)
        try:
            yield
        finally:
            self._end(worker)

    def _worker(self, **options: Any) -> Worker:
        return Worker(max_bytes=0, patience=Patience("", self._max_wait), **options)

    def _end(self, worker: Worker) -> None:
        """Wait for the upload thread to end, for at most `max_wait` seconds without progress."""
        text = f"uploading the rest of the trace to {self.url}; stops after {self._max_wait:.0f} s without progress"
        note = Timer(_QUIET_S, self._print, [text])
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
                self._print(f"{error}; recording continues in {self.folder} and is uploaded later")
            self._has_failed = True

    def finish(self) -> None:
        """Upload the files not uploaded yet, and remove the cache folder.

        Raises StorageError, and keeps the folder, if the upload fails or makes no progress for `max_wait` seconds.
        """
        error: BaseException | None = None
        if not self._is_stuck:
            worker = self._worker()
            worker.submit(self._upload.send, 0)
            worker.submit(self._upload.send_index, 0)
            self._end(worker)
            error = worker.error
        if self._is_stuck:
            error = StorageError(f"{self.url}: accepted no data for {self._max_wait:.0f} s")
        if isinstance(error, (StorageError, OSError)):
            raise StorageError(
                f"{error}; the complete trace is in {self.folder}: upload it with `{self.remedy}`"
            ) from error
        if error is not None:
            raise error
        shutil.rmtree(self.folder.parent, ignore_errors=True)

    def _print(self, message: str) -> None:
        print(f"tim-trace: {message}", file=sys.stderr, flush=True)
