"""Run a command for `tim-trace record`, and find other `tim-trace record` processes for the same job."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from ..schemas.documents import CLOSED, LAUNCHER, WriterState
from ..schemas.errors import TimTraceError
from ..schemas.layout import WRITERS
from .liveness import AGE, PROCESS, liveness
from .store import Store

NUMBERS = (
    "NODE_RANK", "PET_NODE_RANK", "GROUP_RANK", "SLURM_NODEID", "SLURM_PROCID", "RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK",
)  # fmt: skip
"""Environment variables with a 0-based node or process rank, as set by launchers. torchrun uses the prefix PET_."""
SIGN_S = 5.0
"""Seconds between two heartbeats of `tim-trace record`."""
SIGNED_S = 2 * SIGN_S
"""A `tim-trace record` process counts as ended after this many seconds without a heartbeat."""
_LOOK_S = 0.2

_NUMBER = re.compile(r"--(?:node|machine)[-_]rank[ =](\d+)")
_COUNT = re.compile(r"(?:--(?:nnodes|num[-_]machines)[ =]|PET_NNODES=)(?:\d+:)?0*(?:[2-9]|\d{2,})")


def later_node(command: Sequence[str]) -> str | None:
    """Return the setting that identifies this node as a later one (e.g. RANK=1), or None on the first node."""
    told = list(_NUMBER.finditer(" ".join(command)))
    if not told:
        told = [match for name in NUMBERS if (match := re.fullmatch(r".*=(\d+)", f"{name}={os.environ.get(name)}"))]
    return next((match[0] for match in told if int(match[1])), None)


def has_several_nodes(command: Sequence[str]) -> bool:
    return bool(_COUNT.search(" ".join([f"PET_NNODES={os.environ.get('PET_NNODES')}", *command])))


def is_same(one: Sequence[str], other: Sequence[str]) -> bool:
    return _NUMBER.sub("", " ".join(one)) == _NUMBER.sub("", " ".join(other))


def launchers(folder: str | os.PathLike[str]) -> list[WriterState]:
    with contextlib.suppress(TimTraceError, OSError):
        found = [state for state in Store(folder).writers_named(LAUNCHER) if state.is_launcher]
        return sorted(found, key=lambda state: state.opened_at)
    return []


def running_launchers(
    folder: str | os.PathLike[str], wait_s: float, beside: Collection[str] | None = None
) -> list[WriterState]:
    """Wait up to `wait_s` for `tim-trace record` processes that use this folder, and return the running ones.

    A process on another machine counts only if it sends a heartbeat during the wait, because a process that was killed
    a moment ago still looks alive. If `beside` is given, only the writers listed there are considered, including those
    that closed normally.
    """
    store, end, first = Store(folder), time.monotonic() + wait_s, None
    while True:
        states = [
            state for state in launchers(folder) if (state.attempt_key if beside is None else state.writer in beside)
        ]
        signs = {state.writer: store.seen_at(f"{WRITERS}/{state.writer}.json") for state in states}
        first = signs if first is None else first
        judged = [(state, liveness(state, store)) for state in states]
        signed = {writer for writer, sign in signs.items() if sign != first.get(writer)}
        running = [
            state for state, found in judged
            if (found.is_alive and (found.how == PROCESS or state.writer in signed)) or (beside and state.state == CLOSED)
        ]  # fmt: skip
        may_run = beside is None or any(found.how == AGE and found.is_alive for _, found in judged)
        if running or not may_run or time.monotonic() >= end:
            return running
        time.sleep(_LOOK_S)


FORWARDED = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTSTP,
    signal.SIGCONT,
)  # fmt: skip
_WATCHED = (*FORWARDED, signal.SIGCHLD)
_PR_SET_PDEATHSIG = 1


def _stop_until_continued() -> None:
    os.kill(os.getpid(), signal.SIGTSTP)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTSTP])
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTSTP])


class Child:
    """A running command. Signals to this process are blocked until `wait` returns, so that `wait` can forward them."""

    def __init__(self, process: subprocess.Popen[bytes], unblocked: Collection[int]):
        self._process, self._unblocked = process, unblocked

    @classmethod
    def start(cls, command: Sequence[str], environment: Mapping[str, str]) -> Child:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
        prctl, parent = getattr(ctypes.CDLL(None), "prctl", None), os.getpid()

        def in_child() -> None:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            if prctl is not None:
                prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
                if os.getppid() != parent:  # the parent died before prctl took effect
                    os.kill(os.getpid(), signal.SIGTERM)

        try:
            return cls(subprocess.Popen(list(command), env=dict(environment), preexec_fn=in_child), before)
        except BaseException:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            raise

    def wait(self, meanwhile: Callable[[], None], every_s: float) -> int:
        """Wait for the command and return its exit code, or 128 + the number of the signal that killed it.

        Signals that other processes send to this process are forwarded to the command.
        """
        try:
            while (code := self._process.poll()) is None:
                found = signal.sigtimedwait(_WATCHED, every_s)
                if found is None:
                    meanwhile()
                elif found.si_signo != signal.SIGCHLD and found.si_code <= 0:
                    self._process.send_signal(found.si_signo)
                if found is not None and found.si_signo == signal.SIGTSTP:
                    _stop_until_continued()
            while signal.sigtimedwait(_WATCHED, 0) is not None:  # discard signals meant for the finished command
                pass
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._unblocked)
        return 128 - code if code < 0 else code
