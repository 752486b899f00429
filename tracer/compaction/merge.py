from __future__ import annotations

import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from ...schemas.checksums import SMALL_BLOCK_BYTES, SealedFile
from ...schemas.documents import CLOSED, COMPACTION, WriterState, now
from ...schemas.errors import DamagedTrace, InvalidOption, TraceExists
from ...schemas.layout import DENSE, LOCATE, PASSES, TABLES, TOKENIZER, WEIGHTS, WRITERS, Segment
from ...schemas.passes import REPLAY_PREFIX
from ...schemas.tables import TABLES as TABLE_SPECS
from .. import environment
from ..create import grown_trace, refuse_live, whole_trace
from ..index import write_index
from ..liveness import this_process
from ..parquet_file import write_checked
from ..progress import Progress
from ..seal import adopt, parquet_options
from ..snapshot import Snapshot, TableFile, take_snapshot
from ..store import Store
from ..upload import Upload, forget
from ..whole_file import alone, trace_file, write_part
from .buckets import read_parts, sorted_groups, step_tokens

_MIN_SHARE_OF_TARGET = 0.25
"""A file from an earlier merge is merged again if it is smaller than this fraction of the target size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedTable:
    table: str
    files_before: int
    files_after: int
    bytes_before: int
    bytes_after: int
    files_left: int
    """Number of files that were not merged, because they belong to a replay or are already large."""


def merge(trace: str, file_bytes: int, progress: Progress) -> list[MergedTable]:
    """Merge a local trace's files in place, after finishing any interrupted merge.

    Raises DamagedTrace if parts are missing, InvalidOption if the trace is not local, TraceExists if it is being
    recorded, and StorageError.
    """
    store = Store(trace)
    if not store.is_local:
        raise InvalidOption(
            f"{trace} is not a local folder, so it cannot be merged in place; pass an output", option="output"
        )
    folder = Path(store.root)
    store.manifest()
    adopt(folder)
    refuse_live(store, trace, "cannot be merged")
    with alone(folder):
        finish(folder)
    snapshot = whole_snapshot(store)
    chosen = chosen_files(snapshot, file_bytes)
    if not any(chosen.values()):
        return merged_tables(snapshot, chosen, {})
    with grown_trace(trace) as building:
        files = write_merged(snapshot, chosen, building, file_bytes, progress)
        replaced = tuple(entry.relative for entries in chosen.values() for entry in entries)
        _write_state(building, state_of(snapshot, files, replaced))
    with alone(folder):
        finish(folder)
    return merged_tables(snapshot, chosen, files)


def whole_snapshot(store: Store) -> Snapshot:
    snapshot = take_snapshot(store)
    if snapshot.damaged:
        more = f" (and {len(snapshot.damaged) - 1} more)" if len(snapshot.damaged) > 1 else ""
        raise DamagedTrace(
            f"{store.url} is damaged or incomplete, and merging would make the loss permanent: "
            f"{snapshot.damaged[0]}{more}; tim-trace verify lists all damage"
        )
    return snapshot


def write_merged(
    snapshot: Snapshot, chosen: dict[str, list[TableFile]], building: Path, file_bytes: int, progress: Progress
) -> dict[str, SealedFile]:
    writer = f"{COMPACTION}-{uuid.uuid4().hex[:8]}"
    found: dict[str, SealedFile] = {}
    with progress("merging", sum(entry.rows for entries in chosen.values() for entry in entries)) as advance:
        parts = {table: list(read_parts(snapshot.store, entries)) for table, entries in chosen.items() if entries}
        for table, of_table in parts.items():
            room = building / f"{table}-buckets"
            room.mkdir()
            spec, small = TABLE_SPECS[table], step_tokens(of_table, file_bytes)
            groups = sorted_groups(snapshot.store, spec, of_table, small, room, advance)
            for number, first in enumerate(groups):
                relative = Segment(writer, number).parquet(table)
                with trace_file(building, relative) as temporary:
                    filling = _until_full(first, groups, temporary, file_bytes)
                    found[relative] = write_checked(
                        temporary, relative, spec.schema, filling,
                        block_bytes=SMALL_BLOCK_BYTES, **parquet_options(table, first, splits_ids=True),
                    )  # fmt: skip
            room.rmdir()
    return found


def _until_full(group: pa.Table | None, others: Iterator[pa.Table], path: Path, file_bytes: int) -> Iterator[pa.Table]:
    """Yield row groups until the file reaches `file_bytes`."""
    while group is not None:
        yield group
        group = next(others, None) if path.stat().st_size < file_bytes else None


def chosen_files(snapshot: Snapshot, file_bytes: int) -> dict[str, list[TableFile]]:
    """Return each table's files to merge, or an empty list if merging would only rewrite one file."""
    # Replays are not merged, so that a replay can still be removed by deleting its files.
    replays = {
        state.writer
        for state in snapshot.writers
        if any(name.startswith(f"{PASSES}/{REPLAY_PREFIX}") for name in state.files)
    }
    large = _MIN_SHARE_OF_TARGET * file_bytes
    chosen = {}
    for table in TABLES:
        entries = [entry for entry in snapshot.files[table] if entry.writer not in replays]
        found = [e for e in entries if not e.writer.startswith(f"{COMPACTION}-") or e.file.num_bytes < large]
        chosen[table] = found if len(found) > 1 else []
    return chosen


def state_of(snapshot: Snapshot, files: dict[str, SealedFile], replaced: tuple[str, ...]) -> WriterState:
    writer = next(iter(files)).partition("/")[2].rpartition("-")[0]
    return WriterState(
        writer=writer, run_id=snapshot.manifest.run_id, **this_process(), state=CLOSED, opened_at=now(), closed_at=now(),
        files=files, replaced=replaced, program=environment.program(),
    )  # fmt: skip


def _write_without(folder: Path, state: WriterState, left_out: set[str]) -> None:
    state.files = {name: record for name, record in state.files.items() if name not in left_out}
    state.replaced = ()
    _write_state(folder, state)


def _write_state(folder: Path, state: WriterState) -> None:
    write_part(folder, f"{WRITERS}/{state.writer}.json", state.to_json().encode())


def finish(folder: Path) -> None:
    """Delete the source files of a merge, and remove them from their writers' states."""
    states = Store(folder).writers()[0]
    if not (replaced := {name for state in states for name in state.replaced}):
        return
    for name in replaced:
        (folder / name).unlink(missing_ok=True)
    for state in sorted(states, key=lambda state: bool(state.replaced)):  # the list of replaced files goes last
        if state.replaced or not replaced.isdisjoint(state.files):
            _write_without(folder, state, replaced)


def merged_tables(
    snapshot: Snapshot, chosen: dict[str, list[TableFile]], files: dict[str, SealedFile]
) -> list[MergedTable]:
    after = {table: [file for name, file in files.items() if name.startswith(f"{table}/")] for table in TABLES}
    return [
        MergedTable(
            table=table,
            files_before=len(chosen[table]),
            files_after=len(after[table]),
            bytes_before=sum(entry.file.num_bytes for entry in chosen[table]),
            bytes_after=sum(record.num_bytes for record in after[table]),
            files_left=len(entries) - len(chosen[table]),
        )
        for table, entries in snapshot.files.items()
        if entries
    ]


_COPY_BYTES = 16 << 20


def merge_to(trace: str, output: str, file_bytes: int, *, force: bool, progress: Progress) -> list[MergedTable]:
    """Write a trace with merged files to a folder or URL. The source trace is not changed.

    `force` replaces a trace in the output folder. At a URL, only an interrupted upload from the same run is replaced.
    Raises DamagedTrace if parts are missing, and TraceExists if the trace is being recorded or `output` already exists.
    """
    store = Store(trace)
    if store.is_local:
        store.manifest()
        adopt(Path(store.root))
    refuse_live(store, trace, "cannot be copied")
    snapshot = whole_snapshot(store)
    if snapshot.journals:
        raise TraceExists(
            f"{trace} has rows that are not sealed; run tim-trace compact where it was recorded, then copy the trace"
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
    chosen = chosen_files(snapshot, file_bytes)
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
            if not state.is_removed:
                _write_without(building, state, replaced | snapshot.replaced)
        if files:
            _write_state(building, state_of(snapshot, files, ()))
        write_index(building)
    return merged_tables(snapshot, chosen, files)


def _copy(store: Store, relative: str, folder: Path) -> None:
    size = store.file_size(relative)
    with trace_file(folder, relative) as temporary, open(temporary, "xb") as file:
        for start in range(0, size, _COPY_BYTES):
            file.write(store.read_range(relative, start, min(start + _COPY_BYTES, size)))
