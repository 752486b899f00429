"""Several nodes of one job, each with a `tim-trace record` of its own: which one begins the trace, and how others find it."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ..schemas.errors import TimTraceError
from ..schemas.layout import WRITERS
from ..schemas.writer_state import CLOSED, LAUNCHER, OPEN, WriterState
from .liveness import AGE, PROCESS, liveness
from .store import Store

NUMBERS = (
    "NODE_RANK", "PET_NODE_RANK", "GROUP_RANK", "SLURM_NODEID", "SLURM_PROCID", "RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK",
)  # fmt: skip
"""Environment variables in which launchers number nodes and processes from 0; PET_ is torchrun's."""
JOIN_S = 60.0
"""How long a node waits for the trace that another one begins, seconds."""
SIGN_S = 5.0
"""How often `tim-trace record` shows that it runs, seconds."""
SIGNED_S = 2 * SIGN_S
"""How long one that shows nothing is looked at before it counts as ended."""
_LOOK_S = 0.2

_NUMBER = re.compile(r"--(?:node|machine)[-_]rank(?:=(\d+))?")
_COUNT = re.compile(r"--(?:nnodes|num[-_]machines|num[-_]nodes)(?:=([\d:]+))?")


def later_node(command: Sequence[str]) -> str | None:
    """Return the setting that says a node or process before this one begins the trace, such as RANK=1; None without.

    What the command's arguments say counts before the environment.
    """
    if numbers := _values(command, _NUMBER):
        return next((f"{name} {number}" for name, number in numbers if number.strip("0")), None)
    settings = ((name, os.environ.get(name, "")) for name in NUMBERS)
    return next((f"{name}={number}" for name, number in settings if number.isdecimal() and int(number)), None)


def has_several_nodes(command: Sequence[str]) -> bool:
    """Whether a command is one of those that start a job on several nodes, as its arguments or torchrun's variable say."""
    counts = [count for _, count in _values(command, _COUNT)] or [os.environ.get("PET_NNODES", "")]
    return any(number.isdecimal() and int(number) > 1 for count in counts for number in count.split(":"))


def is_same(one: Sequence[str], other: Sequence[str]) -> bool:
    """Whether two commands differ in the number of their nodes alone."""
    return _without_number(one) == _without_number(other)


def find_recording(
    folder: str | os.PathLike[str], wait_s: float, is_wanted: Callable[[WriterState], bool] = lambda state: True
) -> WriterState | None:
    """Wait for a `tim-trace record` that runs and records to a folder, and return its state; None when there is none in time.

    One that was killed on another machine looks like one that runs, so that a sign is waited for.
    """
    running = _running(Store(folder), wait_s, lambda state: state.attempt_key is not None and is_wanted(state))
    return min(running, key=lambda state: state.opened_at, default=None)


def others_recording(folder: Path, own: WriterState) -> dict[str, str]:
    """Launchers of the same recording that have not ended, or have been killed: writer -> host."""
    return {
        state.writer: state.host
        for state in _launchers(Store(folder))
        if state.attempt_key == own.attempt_key and state.writer != own.writer and state.state == OPEN
    }


def going_on(folder: Path, beside: Mapping[str, str]) -> list[str]:
    """Hosts of those of `others_recording` that were not killed: they run, or have ended since."""
    if not beside:
        return []
    store = Store(folder)
    running = {
        state.writer for state in _running(store, SIGNED_S, lambda state: state.writer in beside, is_patient=False)
    }
    closed = {state.writer for state in _launchers(store) if state.state == CLOSED}
    return sorted({host for writer, host in beside.items() if writer in running | closed})


def _running(
    store: Store, wait_s: float, is_wanted: Callable[[WriterState], bool], *, is_patient: bool = True
) -> list[WriterState]:
    """Open launchers that certainly run, looked for until there are some, the time is over or, unless `is_patient`, none may be.

    It is certain by their process where that can be seen from here, else by a sign that was not there at the first look.
    """
    end = time.monotonic() + wait_s
    first: dict[str, float | None] | None = None
    while True:
        states = [state for state in _launchers(store) if state.state == OPEN and is_wanted(state)]
        signs = {state.writer: store.seen_at(f"{WRITERS}/{state.writer}.json") for state in states}
        judged = {state.writer: liveness(state, store) for state in states}
        first = signs if first is None else first
        has_signed = {writer for writer, sign in signs.items() if writer not in first or sign != first[writer]}
        running = [
            state for state in states
            if (judged[state.writer].how == PROCESS and judged[state.writer].is_alive)
            or (judged[state.writer].how == AGE and state.writer in has_signed)
        ]  # fmt: skip
        may_be = is_patient or any(found.how == AGE for found in judged.values())
        if running or not may_be or time.monotonic() >= end:
            return running
        time.sleep(_LOOK_S)


def _launchers(store: Store) -> list[WriterState]:
    with contextlib.suppress(TimTraceError, OSError):
        return [state for state in store.writers_named(LAUNCHER) if state.is_launcher]
    return []


def _values(command: Sequence[str], option: re.Pattern[str]) -> list[tuple[str, str]]:
    """An option's name and value, wherever a command gives it, as `--option VALUE` or `--option=VALUE`."""
    found = []
    for place, word in enumerate(command):
        if match := option.fullmatch(word):
            value = match[1] or (command[place + 1] if place + 1 < len(command) else "")
            found.append((word.partition("=")[0], value))
    return found


def _without_number(command: Sequence[str]) -> list[str]:
    words = list(command)
    for place, word in enumerate(words):
        if match := _NUMBER.fullmatch(word):
            words[place : place + (1 if match[1] else 2)] = [""] * (1 if match[1] else 2)
    return [word for word in words if word]
