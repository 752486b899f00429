"""Recovery of killed writers: seals their journals and removes their half-written files."""

from __future__ import annotations

import contextlib
from pathlib import Path

from ..schemas.errors import DamagedTrace
from ..schemas.layout import JOURNAL, WRITERS, Segment
from ..schemas.writer_state import WriterState
from .journal import JOURNALED, journaled_segments, read_journal
from .liveness import liveness
from .lock import alone
from .replaced import remove_unfinished
from .seal import seal
from .store import Store
from .whole_file import check_no_links, remove_temporaries, write_part


def adopt(folder: Path) -> None:
    """Seal the journals of writers that are no longer alive.

    A segment that cannot be sealed stays a journal, which is also readable. If several processes call this function
    at once, one
    does the work. Raises StorageError if a folder of the trace is a link.
    """
    check_no_links(folder)
    store = Store(folder)
    with alone(folder):
        states, damaged = store.writers()
        dead = [state for state in states if not liveness(state, store).is_alive]
        for state in dead:
            for segment in journaled_segments(store):
                if segment.writer == state.writer:
                    with contextlib.suppress(OSError, DamagedTrace):
                        _adopt(folder, segment, state)
        if len(dead) == len(states) and not damaged:
            remove_temporaries(folder)
            remove_unfinished(folder)
            with contextlib.suppress(OSError):  # not a file written by tim-trace
                (folder / JOURNAL).rmdir()


def _adopt(folder: Path, segment: Segment, state: WriterState) -> None:
    store, tables = Store(folder), journaled_segments(Store(folder)).get(segment, ())
    torn = {segment.journal(table): read_journal(store, segment, table).torn_bytes for table in tables}
    files = seal(folder, segment)
    journals = [segment.journal(table) for table in JOURNALED]
    if state.files is not None:
        state.files |= files
        state.torn_journals |= {name: num_bytes for name, num_bytes in torn.items() if num_bytes}
        state.journals = tuple(name for name in state.journals if name not in journals)
        write_part(folder, f"{WRITERS}/{state.writer}.json", state.to_json().encode())
    for name in journals:
        (folder / name).unlink(missing_ok=True)
