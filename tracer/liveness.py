"""Determine whether a writer is alive, which data it has not sealed, and its training attempt."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ..schemas.documents import OPEN, WriterState
from ..schemas.layout import JOURNAL, WRITERS, Segment
from . import environment
from .journal import JOURNALED
from .store import Store

HEARTBEAT_S = 60.0
"""Interval in seconds at which an open writer touches its state file."""
SILENT_S = 900.0
"""A writer on another machine counts as ended after this many seconds without a heartbeat."""

CLOSED_ITSELF, PROCESS, RESTARTED, AGE = "closed", "process", "restarted", "age"
"""Evidence that `liveness` used: a normal close, the process, a machine reboot, or the last heartbeat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Liveness:
    is_alive: bool
    how: str
    silent_s: float | None = None
    """Seconds since the last heartbeat, or None if unknown or not needed."""


def this_process() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "boot_id": boot_id(),
        "pid_namespace": pid_namespace(),
        "pid": os.getpid(),
        "process_start": process_start(os.getpid()),
    }


def liveness(state: WriterState, store: Store) -> Liveness:
    """Decide whether a writer is alive: by its process if the process is visible here, else by its last heartbeat."""
    if state.state != OPEN:
        return Liveness(is_alive=False, how=CLOSED_ITSELF)
    if store.is_local and state.host == socket.gethostname():
        if state.boot_id is None or (state.boot_id == boot_id() and state.pid_namespace == pid_namespace()):
            return Liveness(is_alive=_is_running(state), how=PROCESS)
        booted_at = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        if state.boot_id != boot_id() and (seen := last_sign(state, store)) is not None and seen < booted_at:
            return Liveness(is_alive=False, how=RESTARTED)
    seen = last_sign(state, store)
    silent_s = None if seen is None else max(time.time() - seen, 0.0)
    return Liveness(is_alive=silent_s is None or silent_s < SILENT_S, how=AGE, silent_s=silent_s)


def last_sign(state: WriterState, store: Store) -> float | None:
    journals = [f"{JOURNAL}/{name}" for name in store.files(JOURNAL) if name.startswith(f"{state.writer}-")]
    signs = [store.seen_at(name) for name in (f"{WRITERS}/{state.writer}.json", *journals)]
    return max((sign for sign in signs if sign is not None), default=None)


@cache
def boot_id() -> str | None:
    return _text("/proc/sys/kernel/random/boot_id")


def pid_namespace() -> str | None:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return None


def process_start(pid: int) -> int | None:
    """Return a process's start time in clock ticks since boot."""
    fields = _stat(pid)
    return int(fields[19]) if len(fields) > 19 else None


def _is_running(state: WriterState) -> bool:
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
    """Return the fields of /proc/<pid>/stat from the third one (the process state) on."""
    text = _text(f"/proc/{pid}/stat")
    return [] if text is None else text.rpartition(")")[2].split()


def _text(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    number: int
    """Attempts are numbered from 1 in start order."""
    key: str


def next_attempt(store: Store, session: str, ordinal: int = 0, *, resumes: bool = False) -> Attempt:
    """Return the attempt that this process begins or joins.

    `session` identifies the launch. `ordinal` counts earlier training runs in this process. With `resumes`, earlier
    recordings from this process belong to a previous attempt even if still open (common in notebooks).

    All ranks restart together, but torchrun's restart count may differ between nodes, so each rank counts its own
    earlier writers. A new rank takes its attempt number from rank 0, or from a driver that has no rank.
    """
    own = _states_with_attempt(store, environment.rank())
    base = f"{session}/{restarts()}/{ordinal}"
    before = [state for state in own if str(state.attempt_key).rpartition(".")[0] == base]
    beside = next((state for state in before if _can_be_joined(state, store, resumes)), None)
    if beside is not None:
        return Attempt(number=_newest([beside]), key=str(beside.attempt_key))
    # If one launch runs the script repeatedly, the number of earlier writers tells the runs apart.
    key = f"{base}.{len(before)}"
    if any(_is_of_session(state, session) for state in own):
        return Attempt(number=_newest(own) + 1, key=key)
    leading = _states_with_attempt(store, 0, None)
    begun = [state for state in leading if _is_of_session(state, session)]
    return Attempt(number=_newest(begun) if begun else _newest([*own, *leading]) + 1, key=key)


def _states_with_attempt(store: Store, *ranks: int | None) -> list[WriterState]:
    return [
        state for state in states_of_rank(store, *ranks) if state.attempt is not None and state.attempt_key is not None
    ]


def states_of_rank(store: Store, *ranks: int | None) -> list[WriterState]:
    return store.writers_named(*map(writer_prefix, ranks))


def writer_prefix(rank: int | None) -> str:
    return "p" if rank is None else f"r{rank}-p"


def _newest(states: Iterable[WriterState]) -> int:
    return max((state.attempt or 0 for state in states), default=0)


def restarts() -> str:
    told = [os.environ.get(name, "") for name in ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")]
    return "-".join(told).strip("-")


def is_of_this_start(state: WriterState, session: str) -> bool:
    return state.attempt_key is None or state.attempt_key.startswith(f"{session}/{restarts()}/")


def _is_of_session(state: WriterState, session: str) -> bool:
    return str(state.attempt_key).startswith(f"{session}/")


def _can_be_joined(state: WriterState, store: Store, resumes: bool) -> bool:
    if state.state != OPEN:
        return False
    if is_this_process(state):
        return not resumes
    return state.rank is None and liveness(state, store).is_alive


def is_this_process(state: WriterState) -> bool:
    return (state.boot_id, state.pid, state.process_start) == (boot_id(), os.getpid(), process_start(os.getpid()))


def journaled_segments(store: Store) -> dict[Segment, dict[str, int]]:
    """Return the size of each journal (bytes), by unsealed segment and table."""
    found: dict[Segment, dict[str, int]] = {}
    for name, num_bytes in store.files(JOURNAL).items():
        if (journal := journal_of(name)) is not None:
            found.setdefault(journal[0], {})[journal[1]] = num_bytes
    return {segment: found[segment] for segment in sorted(found)}


def journal_of(name: str) -> tuple[Segment, str] | None:
    stem, _, table = name.removesuffix(".arrows").rpartition(".")
    segment = Segment.parse(stem)
    return (segment, table) if segment is not None and table in JOURNALED and name.endswith(".arrows") else None
