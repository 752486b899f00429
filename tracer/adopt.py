"""Finishing what killed writers left: their journals are sealed, their half-written files removed."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from ..schemas.layout import JOURNAL
from ..schemas.writer_state import OPEN, WriterState
from .journal import journaled_segments
from .seal import seal
from .store import Store, remove_temporaries


def adopt(folder: Path) -> None:
    """Seal the journals of writers that are not alive any more; does nothing for the others.

    A segment that cannot be sealed stays a journal, which is readable as well.
    """
    store = Store(folder)
    states, _ = store.writers()
    alive = {state.writer for state in states if is_alive(state)}
    for segment in journaled_segments(store):
        if segment.writer not in alive:
            try:
                seal(folder, segment)
            except OSError:
                continue
    if not alive:
        remove_temporaries(folder)
        with contextlib.suppress(OSError):  # something else lies there
            (folder / JOURNAL).rmdir()


def is_alive(state: WriterState) -> bool:
    """Whether a writer may still write: it is open, and its process exists or is on another machine."""
    if state.state != OPEN:
        return False
    if state.host != socket.gethostname():
        return True
    try:
        os.kill(state.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return not _is_zombie(state.pid)


def _is_zombie(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[:1] == ["Z"]
