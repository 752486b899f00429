from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..schemas.errors import InvalidOption, StorageStalled

MAX_WAIT_S = 60.0
"""Default timeout for an unresponsive file system (seconds)."""
_TELLS_EVERY_S = 5.0
_LOOKS_EVERY_S = 0.5


def say(sentence: str) -> None:
    print(f"tim-trace: {sentence}", file=sys.stderr, flush=True)


class Patience:
    """Limits how long callers wait for a file system, and reports long waits on stderr."""

    def __init__(
        self,
        path: str | os.PathLike[str] = "",
        max_wait_s: float = math.inf,
        meanwhile: Callable[[], None] = lambda: None,
    ):
        """`path` identifies the file system in messages. `meanwhile` is called after each message."""
        if not max_wait_s > 0:
            raise InvalidOption(f"got {max_wait_s}; pass a number of seconds above 0", option="max_wait")
        self.max_wait_s = max_wait_s
        self.waited_s = 0.0
        self._path, self._meanwhile = os.fspath(path), meanwhile

    def wait(
        self, changed: threading.Condition, is_blocked: Callable[[], bool], *, is_excused: Callable[[], bool],
        signs: Callable[[], Any] | None = None, every_s: float = math.inf, counts: bool = True,
    ) -> None:  # fmt: skip
        """Wait while `is_blocked` returns True. Raises StorageStalled after `max_wait_s`.

        The caller must hold `changed`. Time does not count towards the limit while `is_excused` returns True. The clock
        restarts whenever the value returned by `signs` changes.
        """
        last, seen, still_s, told_s = time.monotonic(), signs and signs(), 0.0, 0.0
        while is_blocked():
            excused = is_excused()
            most_s = min(every_s, self.max_wait_s, _LOOKS_EVERY_S if self._path or signs else math.inf)
            changed.wait(None if most_s == math.inf else most_s)
            now = time.monotonic()
            passed_s, last = now - last, now
            if excused:
                continue
            self.waited_s += passed_s if counts else 0.0
            still_s += passed_s
            if signs is not None and (new := signs()) != seen:
                seen, still_s, told_s = new, 0.0, 0.0
            if still_s >= self.max_wait_s and is_blocked():
                raise StorageStalled(f"{self._path} did not respond within {self.max_wait_s:g} s ({self._mount()})")
            if self._path and still_s >= told_s + _TELLS_EVERY_S:
                told_s = still_s
                bound = "" if self.max_wait_s == math.inf else f"; this process gives up after {self.max_wait_s:g} s"
                say(f"waiting for {self._path} ({self._mount()}) to respond, {still_s:.0f} s so far{bound}")
                self._meanwhile()

    def _mount(self) -> str:
        """Describe the path's file system from the kernel's mount list, without accessing the path."""
        try:
            path = Path(os.path.abspath(self._path))
            mounts = [line.split() for line in Path("/proc/self/mounts").read_text(errors="replace").splitlines()]
        except OSError:
            return "file system unknown"
        above = [mount for mount in mounts if path.is_relative_to(mount[1].replace("\\040", " "))]
        device, place, kind = max(above, key=lambda mount: len(mount[1]), default=["nothing", "/", "unknown"])[:3]
        return f"file system {kind} of {device} at {place}"
