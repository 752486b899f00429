"""Attempts at training: a run that resumes from a checkpoint makes some steps again, and its rows say in which attempt."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ..schemas.writer_state import OPEN, WriterState
from . import environment
from .liveness import boot_id, process_start
from .store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One attempt at training."""

    number: int
    """From 1, in the order in which they began."""
    key: str
    """The same for all of its processes."""


def next_attempt(store: Store, session: str, ordinal: int = 0) -> Attempt:
    """The attempt that this process begins, or takes part in where another process began it.

    `session` names what started it; `ordinal` counts the trainings in this process before it. Processes of one attempt have
    these in common, and the number of restarts that torchrun or Slurm tell.
    """
    states = [state for state in store.writers()[0] if state.attempt is not None and state.attempt_key is not None]
    base = f"{session}/{restarts()}/{ordinal}"
    before = [state for state in states if _base(state) == base and state.rank == environment.rank()]
    here = next((state for state in before if state.state == OPEN and _is_this_process(state)), None)
    # Whoever had this place before has ended: nothing else tells a loop around a script from its first round.
    key = f"{base}.{len(before)}" if here is None else str(here.attempt_key)
    numbers = [state.attempt for state in states if state.attempt is not None and state.attempt_key == key]
    newest = max((state.attempt for state in states if state.attempt is not None), default=0)
    return Attempt(number=numbers[0] if numbers else newest + 1, key=key)


def restarts() -> str:
    """How often torchrun restarted its workers and Slurm the job, as the environment tells; empty where it does not."""
    told = [os.environ.get(name, "") for name in ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")]
    return "-".join(told).strip("-")


def is_of_this_start(state: WriterState, session: str) -> bool:
    """Whether a writer's process was started as this one was: torchrun and Slurm did not restart it since."""
    return state.attempt_key is None or state.attempt_key.startswith(f"{session}/{restarts()}/")


def _base(state: WriterState) -> str:
    return str(state.attempt_key).rpartition(".")[0]


def _is_this_process(state: WriterState) -> bool:
    return (state.boot_id, state.pid, state.process_start) == (boot_id(), os.getpid(), process_start(os.getpid()))
