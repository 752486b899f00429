"""Whether a writer may still write, and how that is known."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypedDict

from ..schemas.layout import JOURNAL, WRITERS
from ..schemas.writer_state import OPEN, WriterState
from .store import Store

HEARTBEAT_S = 60.0
"""How often an open writer touches its state file."""
SILENT_S = 900.0
"""After how long without a sign a writer on another machine counts as ended."""

CLOSED_ITSELF, PROCESS, RESTARTED, AGE = "closed", "process", "restarted", "age"
"""How it is known: it said so, its process is there or not, its machine was started anew since, or its last sign's age."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Liveness:
    """Whether a writer may still write."""

    is_alive: bool
    how: str
    """CLOSED_ITSELF, PROCESS, RESTARTED or AGE."""
    silent_s: float | None = None
    """Seconds since its last sign, where its age decided; None where no file tells."""


class Process(TypedDict):
    """What names one process: fields of a writer's state."""

    host: str
    boot_id: str | None
    pid_namespace: str | None
    pid: int
    process_start: int | None


def this_process() -> Process:
    """What names the process that asks."""
    pid = os.getpid()
    return Process(
        host=socket.gethostname(),
        boot_id=boot_id(),
        pid_namespace=pid_namespace(),
        pid=pid,
        process_start=process_start(pid),
    )


def liveness(state: WriterState, store: Store) -> Liveness:
    """Judge a writer: by its process where that can be seen from here, else by the age of its last sign."""
    if state.state != OPEN:
        return Liveness(is_alive=False, how=CLOSED_ITSELF)
    if store.is_local and state.host == socket.gethostname():
        if state.boot_id is None or (state.boot_id == boot_id() and state.pid_namespace == pid_namespace()):
            return Liveness(is_alive=_runs(state), how=PROCESS)
        if state.boot_id != boot_id() and (seen := last_sign(state, store)) is not None and seen < _boot_time():
            return Liveness(is_alive=False, how=RESTARTED)
    seen = last_sign(state, store)
    silent_s = None if seen is None else max(time.time() - seen, 0.0)
    return Liveness(is_alive=silent_s is None or silent_s < SILENT_S, how=AGE, silent_s=silent_s)


def last_sign(state: WriterState, store: Store) -> float | None:
    """When a writer last touched a file, seconds since 1970; None where the file system does not tell."""
    journals = [f"{JOURNAL}/{name}" for name in store.files(JOURNAL) if name.startswith(f"{state.writer}-")]
    signs = [store.seen_at(name) for name in (f"{WRITERS}/{state.writer}.json", *journals)]
    return max((sign for sign in signs if sign is not None), default=None)


@cache
def boot_id() -> str | None:
    """Names the start of this machine's kernel; None where the system does not tell."""
    return _text("/proc/sys/kernel/random/boot_id")


def pid_namespace() -> str | None:
    """Names the set of processes that this one's pid is a number of; None where the system does not tell."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return None


def process_start(pid: int) -> int | None:
    """When a process began, clock ticks since the machine started; None where there is none or the system does not tell."""
    fields = _stat(pid)
    return int(fields[19]) if len(fields) > 19 else None


def _runs(state: WriterState) -> bool:
    """Whether the process is there that wrote this, and not another one with its number."""
    try:
        os.kill(state.pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    if state.pid <= 0 or _stat(state.pid)[:1] == ["Z"]:
        return False
    started = process_start(state.pid)
    return state.process_start is None or started is None or started == state.process_start


def _stat(pid: int) -> list[str]:
    """The fields of /proc/<pid>/stat from the state on, which is the third."""
    text = _text(f"/proc/{pid}/stat")
    return [] if text is None else text.rpartition(")")[2].split()


@cache
def _boot_time() -> float:
    """When this machine started, seconds since 1970."""
    for line in (_text("/proc/stat") or "").splitlines():
        if line.startswith("btime "):
            return float(line.split()[1])
    return 0.0


def _text(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
