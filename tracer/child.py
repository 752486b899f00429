"""Run a command transparently: each signal reaches the command exactly once, and the command does not outlive this
process.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence

FORWARDED = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTSTP,
    signal.SIGCONT,
)  # fmt: skip
_WATCHED = (*FORWARDED, signal.SIGCHLD)
_PR_SET_PDEATHSIG = 1


def _stop() -> None:
    """Stop this process, as the default action for SIGTSTP does, until SIGCONT continues it."""
    os.kill(os.getpid(), signal.SIGTSTP)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTSTP])
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTSTP])


class Child:
    """A running command. From `start` to the end of `wait`, signals sent to this process are held back for it."""

    def __init__(self, process: subprocess.Popen[bytes], unblock: Callable[[], None]):
        self._process, self._unblock = process, unblock

    @classmethod
    def start(cls, command: Sequence[str], environment: Mapping[str, str]) -> Child:
        """Start a command. Raises OSError if it cannot be executed."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
        prctl, parent = getattr(ctypes.CDLL(None), "prctl", None), os.getpid()

        def in_child() -> None:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            if prctl is not None:
                prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
                if os.getppid() != parent:  # the parent died before prctl took effect
                    os.kill(os.getpid(), signal.SIGTERM)

        def unblock() -> None:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

        try:
            process = subprocess.Popen(list(command), env=dict(environment), preexec_fn=in_child)
        except BaseException:
            unblock()
            raise
        return cls(process, unblock)

    def wait(self, meanwhile: Callable[[], None], every_s: float) -> int:
        """Wait for the command's exit code, 128 + a signal that killed it; call `meanwhile` every `every_s` seconds.

        Signals from processes are forwarded. Signals from the terminal (Ctrl-C, Ctrl-Z, a hang-up) reach the command directly
        and are not forwarded. This process stops and continues together with the command.
        """
        try:
            while (code := self._process.poll()) is None:
                found = signal.sigtimedwait(_WATCHED, every_s)
                if found is None:
                    meanwhile()
                elif found.si_signo != signal.SIGCHLD and found.si_code <= 0:
                    self._process.send_signal(found.si_signo)
                if found is not None and found.si_signo == signal.SIGTSTP:
                    _stop()
            while signal.sigtimedwait(_WATCHED, 0) is not None:  # discard signals meant for the ended command
                pass
        finally:
            self._unblock()
        return 128 - code if code < 0 else code
