"""Training attempts: a run resumed from a checkpoint repeats some steps, so each row stores its attempt."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from ..schemas.writer_state import OPEN, WriterState
from . import environment
from .liveness import boot_id, liveness, process_start
from .store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A training attempt: training from one start or resumption to its end."""

    number: int
    """Number of the attempt, counted from 1 in the order in which attempts started."""
    key: str
    """Key shared by all processes in the attempt."""


def next_attempt(store: Store, session: str, ordinal: int = 0, *, resumes: bool = False) -> Attempt:
    """Return the attempt that this process begins or joins.

    `session` identifies the launch; `ordinal` is the number of earlier trainings in this process. If `resumes` is True,
    earlier recordings of this process belong to a previous attempt even if still open, as in a notebook.

    A rank counts its own earlier writers, because ranks restart together while torchrun's restart counts are per node. A rank
    that is new in this session takes the number of rank 0, or of a driver without a rank. No other state is read.
    """
    rank = environment.rank()
    own = _attempting(store, rank)
    base = f"{session}/{restarts()}/{ordinal}"
    before = [state for state in own if _base(state) == base]
    beside = next((state for state in before if _is_beside(state, store, resumes)), None)
    if beside is not None:
        return Attempt(number=_newest([beside]), key=str(beside.attempt_key))
    # If all earlier writers of this rank have ended, only their number distinguishes the iterations of a loop around a
    # script.
    key = f"{base}.{len(before)}"
    if any(_is_of(state, session) for state in own):
        return Attempt(number=_newest(own) + 1, key=key)
    leading = _attempting(store, 0, None)
    begun = [state for state in leading if _is_of(state, session)]
    return Attempt(number=_newest(begun) if begun else _newest([*own, *leading]) + 1, key=key)


def _attempting(store: Store, *ranks: int | None) -> list[WriterState]:
    """Return the writers of the given ranks that belong to an attempt."""
    return [
        state for state in states_of_rank(store, *ranks) if state.attempt is not None and state.attempt_key is not None
    ]


def states_of_rank(store: Store, *ranks: int | None) -> list[WriterState]:
    """Return the states of the writers for the given ranks; no other state file is read."""
    return store.writers_named(*map(writer_prefix, ranks))


def writer_prefix(rank: int | None) -> str:
    """Return the prefix shared by all writer names of a rank."""
    return "p" if rank is None else f"r{rank}-p"


def _newest(states: Iterable[WriterState]) -> int:
    return max((state.attempt or 0 for state in states), default=0)


def restarts() -> str:
    """Return the restart counts of torchrun and Slurm from the environment; empty if neither is set."""
    told = [os.environ.get(name, "") for name in ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")]
    return "-".join(told).strip("-")


def is_of_this_start(state: WriterState, session: str) -> bool:
    """Return True if a writer's process belongs to this launch and neither torchrun nor Slurm has restarted it
    since."""
    return state.attempt_key is None or state.attempt_key.startswith(f"{session}/{restarts()}/")


def _is_of(state: WriterState, session: str) -> bool:
    return str(state.attempt_key).startswith(f"{session}/")


def _base(state: WriterState) -> str:
    return str(state.attempt_key).rpartition(".")[0]


def _is_beside(state: WriterState, store: Store, resumes: bool) -> bool:
    """Return True if a writer without a rank, or a writer in this process, is still recording."""
    if state.state != OPEN:
        return False
    if is_this_process(state):
        return not resumes
    return state.rank is None and liveness(state, store).is_alive


def is_this_process(state: WriterState) -> bool:
    """Return True if this process opened the writer."""
    return (state.boot_id, state.pid, state.process_start) == (boot_id(), os.getpid(), process_start(os.getpid()))
