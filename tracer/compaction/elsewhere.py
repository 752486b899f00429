"""Copies a trace to another folder or to object storage, with its files merged."""

from __future__ import annotations

import tempfile
from pathlib import Path

from ...schemas.errors import TraceExists
from ...schemas.layout import DENSE, LOCATE, PASSES, TABLES, TOKENIZER, WEIGHTS, WRITERS
from ..adopt import adopt
from ..create import refuse_live, whole_trace
from ..index import write_index
from ..progress import Progress
from ..sender import forget
from ..snapshot import Snapshot
from ..store import Store
from ..upload import Upload
from ..whole_file import trace_file, write_part
from .merge import MergedTable, chosen_files, merged_tables, state_of, whole_snapshot, write_merged

_COPY_BYTES = 16 << 20


def merge_to(trace: str, output: str, file_bytes: int, *, force: bool, progress: Progress) -> list[MergedTable]:
    """Write a trace with merged files to `output`, a folder or a URL. The source trace is not changed.

    With `force`, an output folder that contains a trace is replaced. At a URL, only an interrupted upload of the same
    run is replaced; the local cache folder left by that upload is removed once everything is uploaded. Raises
    DamagedTrace if a part of the trace is missing, and TraceExists if the trace is being recorded or `output` already
    exists.
    """
    store = Store(trace)
    if store.is_local:
        store.manifest()
        adopt(Path(store.root))
    refuse_live(store, trace, "is not copied")
    snapshot = whole_snapshot(store)
    if snapshot.journals:
        raise TraceExists(
            f"{trace}: has rows that are not sealed; first compact it where it was recorded, then copy it"
        )
    if "://" not in output:
        return _write(snapshot, Path(output), file_bytes, force, progress)
    with tempfile.TemporaryDirectory(prefix="tim-trace-") as room:
        upload = Upload(Path(room, "trace"), output)
        replaces_part = upload.has_part_of(snapshot.manifest.run_id, store.walk(""))
        merged = _write(snapshot, upload.folder, file_bytes, force, progress)
        upload.send(progress)
        if replaces_part:
            for folder in (*TABLES, WRITERS):
                upload.keep_only(folder, Store(upload.folder).files(folder))
        upload.send_index()
        forget(trace, output)
        return merged


def _write(snapshot: Snapshot, output: Path, file_bytes: int, force: bool, progress: Progress) -> list[MergedTable]:
    store = snapshot.store
    chosen = {table: chosen_files(snapshot, table, file_bytes) for table in TABLES}
    replaced = {entry.relative for entries in chosen.values() for entry in entries}
    left = [entry.relative for table in TABLES for entry in snapshot.files[table] if entry.relative not in replaced]
    with whole_trace(output, snapshot.manifest, force=force) as building:
        files = write_merged(snapshot, chosen, building, file_bytes, progress)
        for relative in left:
            _copy(store, relative, building)
        for folder in (PASSES, TOKENIZER, WEIGHTS, DENSE, LOCATE):
            for name in store.walk(folder):
                _copy(store, f"{folder}/{name}", building)
        for state in snapshot.writers:
            if state.is_removed:
                continue
            kept = {name: record for name, record in (state.files or {}).items() if name not in replaced}
            state.files = {name: record for name, record in kept.items() if name not in snapshot.replaced}
            state.replaced = ()
            write_part(building, f"{WRITERS}/{state.writer}.json", state.to_json().encode())
        if files:
            write_part(building, *state_of(snapshot, files, ()))
        write_index(building)
    return merged_tables(snapshot, chosen, files)


def _copy(store: Store, relative: str, folder: Path) -> None:
    size = store.file_size(relative)
    with trace_file(folder, relative) as temporary, open(temporary, "xb") as file:
        for start in range(0, size, _COPY_BYTES):
            file.write(store.read_range(relative, start, min(start + _COPY_BYTES, size)))
