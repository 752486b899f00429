"""Sending a trace to object storage while it is recorded, from a folder of the user's cache."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

from ..schemas.checksums import short_hash
from ..schemas.errors import StorageError, TraceExists
from .liveness import HEARTBEAT_S


class Sender:
    """A trace that is recorded to a URL: the folder that it is written to first, and what was sent of it."""

    def __init__(self, url: str):
        """Raises TraceExists where something lies at the URL, or what an earlier recording could not send still lies here."""
        from .upload import Upload  # here, so that a command starts before the file systems' libraries are loaded

        self.url = url
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self.folder = cache / "tim-trace" / short_hash(url.encode()) / url.rstrip("/").rpartition("/")[2]
        if self.folder.exists():
            raise TraceExists(
                f"{url}: an earlier recording that was not sent whole lies in {self.folder}; send it with `tim-trace compact "
                f"{self.folder} -o {url}`, or remove it"
            )
        self._upload = Upload(self.folder, url)
        self._upload.refuse_other()
        self.folder.parent.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Send what is sealed about once a minute, on a thread of its own. What fails is told once, and tried again."""
        ended = Event()
        thread = Thread(target=self._send_often, args=(ended,), name="sender", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _send_often(self, ended: Event) -> None:
        has_told = False
        while not ended.wait(HEARTBEAT_S):
            try:
                self._upload.send()
                if self._upload.has_grown:
                    self._upload.send_index()
            except (StorageError, OSError) as error:
                if not has_told:
                    print(
                        f"tim-trace: {error}; recording goes on in {self.folder}, and is sent later",
                        file=sys.stderr,
                        flush=True,
                    )
                has_told = True

    def finish(self) -> None:
        """Send all that is left, and remove the folder. Raises StorageError, and leaves the folder then."""
        try:
            self._upload.send()
            self._upload.send_index()
        except (StorageError, OSError) as error:
            raise StorageError(
                f"{error}; the whole trace lies in {self.folder}: send it with `tim-trace compact {self.folder} -o {self.url}`"
            ) from error
        shutil.rmtree(self.folder.parent, ignore_errors=True)
