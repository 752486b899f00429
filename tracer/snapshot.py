"""A trace at one point in time: sealed files, live or killed writers' journals, and any damage."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ..schemas.checksums import SealedFile
from ..schemas.documents import CLOSED, FAILED, Manifest, WriterState, contract_hash, read_object
from ..schemas.errors import DamagedTrace, QueryFailed
from ..schemas.layout import (
    DENSE,
    EVAL_SEQUENCES,
    FOLDERS,
    INDEX,
    JOURNAL,
    METRICS,
    PASSES,
    SEQUENCES,
    TABLES,
    TOKENIZER,
    WEIGHTS,
    WRITERS,
    Segment,
)  # fmt: skip
from ..schemas.lazy import collector_paused
from ..schemas.tables import TABLES as TABLE_SPECS
from ..schemas.tables import Table
from .index import Index, read_index
from .journal import read_journal
from .liveness import Liveness, journal_of, journaled_segments, liveness
from .parquet_file import ParquetFooter, read_footer
from .store import Store, first_line, listed
from .verified_file import FileChecksums, FileCursor, VerifiedFile

_MAX_TRIES = 100
_RESTORE = "Restore the file from a backup"
_FOREIGN = "is not a trace file, so it is ignored. Remove it"
_UNLISTED = "is not listed in its writer's state, so its rows are ignored. Remove it"
_RESTORE_OR_FIX = "Restore the file from a backup, or fix the program that wrote it (see `tim-trace verify --format`)"


@dataclass(slots=True)
class TableFile:
    relative: str
    file: VerifiedFile
    lacking: tuple[str, ...]
    """Columns that the file lacks because an older release wrote it."""
    rows: int
    steps: tuple[int, int] | None = None
    """First and last step from the writer's state, or None if unknown or if the file has no rows."""
    newest: dict[int, int] | None = None
    """Newest training attempt at each step, or None if not read yet."""

    @property
    def writer(self) -> str:
        return self.relative.rpartition("/")[2].rpartition("-")[0]


Journals = dict[Segment, dict[str, int]]
"""Number of bytes to read from each unsealed journal, by segment and table."""
Examined = dict[str, TableFile]
"""Readable sealed files by path. They never change."""


@dataclass(slots=True, kw_only=True)
class Snapshot:
    store: Store
    manifest: Manifest
    writers: list[WriterState] = field(default_factory=list)
    liveness: dict[str, Liveness] = field(default_factory=dict)
    files: dict[str, list[TableFile]] = field(default_factory=dict)
    journals: dict[str, pa.Table] = field(default_factory=dict)
    contracts: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    """One sentence per damaged or missing part. These parts are excluded from all results."""
    ignored: list[str] = field(default_factory=list)
    """One sentence per file that does not belong to the trace."""
    torn_bytes: int = 0
    """Total size of the incomplete records at the ends of journals (bytes)."""
    examined: Examined = field(default_factory=dict)
    index: Index = field(default_factory=Index)
    _lacking: dict[tuple[str, int], tuple[str, ...]] = field(default_factory=dict)
    """Cache of `_lacking_columns`, keyed by table name and the id() of a schema from the index."""
    _seen: set[str] = field(default_factory=set)
    _suspects: set[str] = field(default_factory=set)
    """Writers whose state does not match their files, perhaps because the state has since changed."""

    @property
    def is_live(self) -> bool:
        return any(found.is_alive for found in self.liveness.values())

    @property
    def accounted(self) -> dict[str, SealedFile]:
        found: dict[str, SealedFile] = {}
        for state in self.writers:
            found |= {} if state.is_removed else state.files
        replaced = self.replaced
        return {name: record for name, record in found.items() if name not in replaced}

    @property
    def replaced(self) -> set[str]:
        return {name for state in self.writers for name in state.replaced}


def take_snapshot(store: Store, *, examined: Examined | None = None) -> Snapshot:
    """Take a snapshot of a trace. Unreadable parts are skipped and listed in `damaged`.

    Pass the same `examined` to repeated snapshots, so that sealed files are opened only once.
    """
    manifest, known = store.manifest(), {} if examined is None else examined
    for _ in range(_MAX_TRIES):
        snapshot = Snapshot(store=store, manifest=manifest, examined=known)
        try:
            with collector_paused():  # the garbage collector would scan tens of thousands of objects repeatedly
                _read_all(snapshot)
        except FileNotFoundError:  # a segment was sealed between listing and reading, so retry
            continue
        if not _has_changed(snapshot):
            return snapshot
    raise QueryFailed(f"{store.url} is being written faster than it can be read. Try again")


def _read_all(snapshot: Snapshot) -> None:
    store = snapshot.store
    store.look()
    snapshot.index = read_index(store)
    for folder in FOLDERS:
        if (real := store.link_out(folder)) is not None:
            snapshot.damaged.append(store.link_problem(folder, real))
    snapshot.writers, damaged = store.writers(snapshot.manifest, snapshot.index.state)
    snapshot.damaged += damaged
    # List journals first, so that rows sealed after this are found among the sealed files below.
    journals = _journals_of_one_moment(store)
    if not snapshot.manifest.checksums:
        _adopt_files(snapshot, journals)
    snapshot.liveness = {state.writer: liveness(state, store) for state in snapshot.writers}
    lost: dict[str, list[str]] = {}
    for table in TABLES:
        _read_table(snapshot, table, journals, lost)
    arriving = store.arriving_writers() if lost else set()
    for writer, files in sorted(lost.items()):
        snapshot._suspects.add(writer)
        if writer in arriving:
            continue
        snapshot.damaged.append(
            f"{store.shown(f'{WRITERS}/{writer}.json')} is missing or damaged, so this writer's files cannot be "
            f"verified. Excluded from results: {listed(files, 8)}. Restore the state from a backup, or remove these "
            "files"
        )
    _read_contracts(snapshot)
    _find_missing(snapshot)
    for name in store.aside():
        snapshot.ignored.append(
            f"{store.shown(name)} is a replaced trace, left behind by a process that died before removing it. Open "
            "this path to read it, or remove it"
        )
    for state in snapshot.writers:
        if state.state == FAILED:
            snapshot.damaged.append(
                f"writer {state.writer} stopped recording early while training continued: {state.error}"
            )
        for name, num_bytes in state.torn_journals.items():
            snapshot.damaged.append(torn_record(store.shown(name), num_bytes))


def _journals_of_one_moment(store: Store) -> Journals:
    """List journals repeatedly until no writer has appended between two listings.

    If journals grow too fast, sequences come from the last listing and all other tables from the listing before it, so
    that every score has its sequence.
    """
    before, now = {}, journaled_segments(store)
    for _ in range(_MAX_TRIES):
        before, now = now, journaled_segments(store)
        if now == before:
            break
    of_sequences = (SEQUENCES, EVAL_SEQUENCES)
    return {
        segment: before.get(segment, {}) | {table: size for table, size in tables.items() if table in of_sequences}
        for segment, tables in now.items()
    }


def _adopt_files(snapshot: Snapshot, journals: Journals) -> None:
    """Add unlisted table files to their writers' states. Called only if the trace may lack checksums."""
    states = {state.writer: state for state in snapshot.writers}
    for table in TABLES:
        for name, num_bytes in snapshot.store.files(table).items():
            relative, segment = f"{table}/{name}", Segment.parse(name.removesuffix(".parquet"))
            if segment is None or not name.endswith(".parquet") or table in journals.get(segment, ()):
                continue
            if segment.writer not in states:
                states[segment.writer] = WriterState(
                    writer=segment.writer, run_id=snapshot.manifest.run_id, state=CLOSED
                )
                snapshot.writers.append(states[segment.writer])
            states[segment.writer].files.setdefault(relative, SealedFile(num_bytes=num_bytes, hash=""))


def _read_table(snapshot: Snapshot, table: str, journals: Journals, lost: dict[str, list[str]]) -> None:
    store, states = snapshot.store, {state.writer: state for state in snapshot.writers}
    replaced = snapshot.replaced
    snapshot.files[table] = []
    sealed: set[Segment] = set()
    for name, num_bytes in store.files(table).items():
        relative = f"{table}/{name}"
        snapshot._seen.add(relative)
        segment = Segment.parse(name.removesuffix(".parquet")) if name.endswith(".parquet") else None
        if segment is None:
            snapshot.ignored.append(f"{store.shown(relative)} {_FOREIGN}")
            continue
        state = states.get(segment.writer)
        if state is None:
            lost.setdefault(segment.writer, []).append(store.shown(relative))
            continue
        if state.is_removed or relative in replaced:
            sealed.add(segment)
            continue
        record = state.files.get(relative)
        if record is None:
            # If the journal still exists, the writer was killed while sealing, and the rows are read from the journal.
            if table not in journals.get(segment, ()):
                snapshot._suspects.add(segment.writer)
                snapshot.ignored.append(f"{store.shown(relative)} {_UNLISTED}")
            continue
        sealed.add(segment)
        try:
            snapshot.files[table].append(_open_file(snapshot, relative, num_bytes, record, TABLE_SPECS[table]))
        except DamagedTrace as error:
            snapshot.damaged.append(f"{error}. Its rows are excluded from all results{_rows_lost(record)}")
    rows: list[pa.RecordBatch] = []
    for segment, tables in journals.items():
        state = states.get(segment.writer)
        if table not in tables or segment in sealed or (state is not None and state.is_removed):
            continue
        if state is None:
            lost.setdefault(segment.writer, []).append(store.shown(segment.journal(table)))
            continue
        rows += _journal_rows(snapshot, segment, table, state, tables[table])
    if rows:
        snapshot.journals[table] = pa.Table.from_batches(rows, TABLE_SPECS[table].schema)


def _rows_lost(record: SealedFile) -> str:
    if record.steps is None:
        return ""
    first, last = record.steps
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    return f" ({record.num_rows:,} rows of {steps})"


def _open_file(snapshot: Snapshot, relative: str, num_bytes: int, record: SealedFile, spec: Table) -> TableFile:
    known = snapshot.examined.get(relative)
    if known is None or known.file.num_bytes != num_bytes:
        if num_bytes != record.num_bytes:
            raise DamagedTrace(
                f"{snapshot.store.shown(relative)} has {num_bytes:,} bytes, but its writer wrote {record.num_bytes:,} "
                f"bytes. {_RESTORE}"
            )
        known = _open_on_demand(snapshot, relative, record, spec) or _open_now(snapshot, relative, record, spec)
        snapshot.examined[relative] = known
    return known


def _open_now(snapshot: Snapshot, relative: str, record: SealedFile, spec: Table) -> TableFile:
    store, where = snapshot.store, snapshot.store.shown(relative)
    indexed = snapshot.index.footer(relative, record.num_bytes, record.footer)
    footer = indexed or read_footer(store, relative, record.num_bytes)
    _check_footer(footer, relative, where, record)
    if indexed:
        lacking = _cached_lacking(snapshot, footer.schema, spec, relative)
    else:
        lacking = _lacking_columns(footer.schema, spec, where)
    keeps_tail = indexed is not None or not store.is_local
    verified = footer.verified(store, relative, keeps_tail=keeps_tail, is_checked=bool(record.hash))
    return TableFile(relative, verified, lacking, footer.num_rows, record.steps)


def _open_on_demand(snapshot: Snapshot, relative: str, record: SealedFile, spec: Table) -> TableFile | None:
    known = snapshot.index.known(relative, record.num_bytes, record.footer)
    if known is None or record.num_rows is None:
        return None
    file, schema = known
    store = snapshot.store
    lacking = _cached_lacking(snapshot, schema, spec, relative)
    checksums = partial(_read_checksums, store, relative, record, file.tail_bytes, spec, lacking)
    return TableFile(
        relative, VerifiedFile(store, relative, record.num_bytes, checksums), lacking, record.num_rows, record.steps
    )


def _read_checksums(
    store: Store, relative: str, record: SealedFile, tail_bytes: int, spec: Table, lacking: tuple[str, ...]
) -> FileChecksums:
    where = store.shown(relative)
    footer = read_footer(store, relative, record.num_bytes, tail_bytes=tail_bytes)
    _check_footer(footer, relative, where, record)
    if _lacking_columns(footer.schema, spec, where) != lacking:
        raise DamagedTrace(f"{where}: its columns differ from the cached index. Remove the folder {INDEX}")
    return footer.checksums(where, keeps_tail=not store.is_local)


def _cached_lacking(snapshot: Snapshot, schema: pa.Schema, spec: Table, relative: str) -> tuple[str, ...]:
    key = spec.name, id(schema)
    if key not in snapshot._lacking:
        snapshot._lacking[key] = _lacking_columns(schema, spec, snapshot.store.shown(relative))
    return snapshot._lacking[key]


def _check_footer(footer: ParquetFooter, relative: str, where: str, record: SealedFile) -> None:
    if footer.identity not in (None, relative):
        raise DamagedTrace(f"{where} was written under another name, {footer.identity}. Remove it")
    if record.hash and (footer.hash, footer.num_rows) != (record.footer, record.num_rows):
        raise DamagedTrace(f"{where}: its footer is damaged. {_RESTORE}")


def _lacking_columns(found: pa.Schema, spec: Table, where: str) -> tuple[str, ...]:
    if len(set(found.names)) != len(found.names):
        raise DamagedTrace(f"{where} has a duplicate column. {_RESTORE_OR_FIX}")
    lacking = tuple(f.name for f in spec.schema if f.name in spec.optional and f.name not in found.names)
    missing = [f.name for f in spec.schema if f.name not in (*found.names, *lacking)]
    if missing:
        raise DamagedTrace(f"{where}: missing columns: {', '.join(missing)}. {_RESTORE_OR_FIX}")
    wrong = [f.name for f in spec.schema if f.name not in lacking and not same_type(found.field(f.name).type, f.type)]
    if wrong:
        raise DamagedTrace(f"{where}: unexpected column types: {', '.join(wrong)}. {_RESTORE_OR_FIX}")
    return lacking


def same_type(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Return True if two Arrow types are equal apart from the names of list elements."""
    if pa.types.is_list(wanted):
        return bool(pa.types.is_list(found)) and same_type(found.value_type, wanted.value_type)
    if pa.types.is_map(wanted):
        return bool(pa.types.is_map(found) and (found.key_type, found.item_type) == (wanted.key_type, wanted.item_type))
    return bool(found.equals(wanted))


def _journal_rows(
    snapshot: Snapshot, segment: Segment, table: str, state: WriterState, num_bytes: int
) -> Iterator[pa.RecordBatch]:
    store, where = snapshot.store, snapshot.store.shown(segment.journal(table))
    try:
        content = read_journal(store, segment, table, num_bytes)
    except DamagedTrace as error:
        snapshot.damaged.append(str(error))
        return
    if segment.journal(table) not in state.journals:
        snapshot._suspects.add(segment.writer)
        if content.batches or content.damage is not None:
            snapshot.ignored.append(f"{where} {_UNLISTED}")
        return
    if not content.has_begun:
        snapshot.damaged.append(
            f"{where} is truncated to {content.torn_bytes:,} bytes, and its rows are excluded from results. {_RESTORE}"
        )
        return
    snapshot.torn_bytes += content.torn_bytes
    completed = [TABLE_SPECS[table].completed(batch) for batch in content.batches]
    if None in completed:
        snapshot.damaged.append(f"{where} contains records with a different schema, which are ignored. Remove the file")
    if content.damage is not None:
        snapshot.damaged.append(f"{where}: {content.damage}. Everything after it is excluded from results. {_RESTORE}")
    found = snapshot.liveness.get(segment.writer)
    if content.torn_bytes and state.state != FAILED and not (found is not None and found.is_alive):
        snapshot.damaged.append(torn_record(where, content.torn_bytes))
    yield from (batch for batch in completed if batch is not None)


def torn_record(where: str, num_bytes: int) -> str:
    return (
        f"{where}: its last {num_bytes:,} bytes are an incomplete record: the process died while writing, or the file was truncated. "
        "Everything before them is read"
    )


def _read_contracts(snapshot: Snapshot) -> None:
    store = snapshot.store
    accounted = snapshot.accounted
    for name in store.walk(PASSES):
        pass_name, _, file = name.rpartition("/")
        if not file.endswith(".json"):
            snapshot.ignored.append(f"{store.shown(f'{PASSES}/{name}')} {_FOREIGN}")
            continue
        digest = file.removesuffix(".json")
        try:
            contract = _contract(snapshot, pass_name, digest)
        except DamagedTrace as error:
            snapshot.damaged.append(str(error))
            continue
        # A live writer may already use a contract that its state does not list yet.
        if f"{PASSES}/{name}" in accounted or snapshot.is_live or not snapshot.manifest.checksums:
            snapshot.contracts.append((pass_name, digest, contract))
        else:
            snapshot.ignored.append(
                f"{store.shown(f'{PASSES}/{name}')} is not listed in any writer's state, so it is ignored. Remove it"
            )


def _contract(snapshot: Snapshot, pass_name: str, digest: str) -> dict[str, Any]:
    content = snapshot.index.documents.get(f"{PASSES}/{pass_name}/{digest}.json")
    if content is not None:
        with contextlib.suppress(DamagedTrace):
            return read_contract(snapshot.store, pass_name, digest, content)
    return read_contract(snapshot.store, pass_name, digest)


def _find_missing(snapshot: Snapshot) -> None:
    store = snapshot.store
    there = {f"{folder}/{name}" for folder in (WEIGHTS, JOURNAL) for name in store.files(folder)}
    there |= snapshot._seen
    there |= {f"{folder}/{name}" for folder in (PASSES, TOKENIZER) for name in store.walk(folder)}
    there |= {f"{DENSE}/{name}/zarr.json" for name in store.folders(DENSE)}
    there |= snapshot.replaced
    for state in snapshot.writers:
        if state.is_removed:
            continue
        for relative, record in state.files.items():
            if relative not in there and not (relative.startswith(f"{WEIGHTS}/") and relative.count("/") > 1):
                snapshot._suspects.add(state.writer)
                snapshot.damaged.append(f"{store.shown(relative)} is missing{_rows_lost(record)}. {_RESTORE}")
        for journal in state.journals:
            found = journal_of(journal.rpartition("/")[2])
            since = found[0].parquet(found[1]) if found is not None and found[1] in TABLES else None
            if journal in there or since in state.files:
                continue
            snapshot._suspects.add(state.writer)
            lost = f"{store.shown(journal)} is missing, along with rows that were not sealed yet. {_RESTORE}"
            if since in there:
                lost = (
                    f"{store.shown(f'{WRITERS}/{state.writer}.json')} is older than {since}, so the rows in "
                    f"{since} are excluded from results. Restore the writer's state from a backup"
                )
            snapshot.damaged.append(lost)


def _has_changed(snapshot: Snapshot) -> bool:
    used = {state.writer: (state.files, state.journals, state.is_removed) for state in snapshot.writers}
    for writer in snapshot._suspects:
        now = None
        with contextlib.suppress(FileNotFoundError, DamagedTrace):
            state = snapshot.store.writer(writer, snapshot.manifest)
            now = state.files, state.journals, state.is_removed
        if used.get(writer) != now:
            return True
    return False


def newest_attempts(snapshot: Snapshot) -> dict[int, int]:
    """Return each step's newest attempt with sequences (else with metrics), or {} if the run has only one attempt."""
    if len({state.attempt for state in snapshot.writers} - {None}) < 2:
        return {}
    newest: dict[int, int] = {}
    for table in (METRICS, SEQUENCES):
        found: dict[int, int] = {}
        parts = [_newest_in(entry) for entry in snapshot.files[table] if "attempt" not in entry.lacking]
        if table in snapshot.journals:
            parts.append(_newest_of(snapshot.journals[table]))
        for part in parts:
            for step, attempt in part.items():
                found[step] = max(attempt, found.get(step, 0))
        newest |= found
    return newest


def _newest_in(entry: TableFile) -> dict[int, int]:
    if entry.newest is None:
        file = pa.PythonFile(FileCursor(entry.file), mode="r")
        entry.newest = _newest_of(pq.read_table(file, columns=["step", "attempt"]))
    return entry.newest


def _newest_of(rows: pa.Table) -> dict[int, int]:
    known = rows.filter(pc.is_valid(rows["attempt"])).group_by("step").aggregate([("attempt", "max")])
    return dict(zip(known["step"].to_pylist(), known["attempt_max"].to_pylist(), strict=True))


def read_contract(store: Store, pass_name: str, digest: str, content: bytes | None = None) -> dict[str, Any]:
    relative = f"{PASSES}/{pass_name}/{digest}.json"
    where = store.shown(relative)
    try:
        found_there = read_object(store.read_json(relative) if content is None else content, where, "a contract")
        name, contract = found_there["pass"], dict(found_there["contract"])
        found = contract_hash(contract)
    except DamagedTrace:
        raise
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedTrace(f"{where} is not a contract ({first_line(error)}). Restore it from a backup") from error
    if (name, found) != (pass_name, digest):
        raise DamagedTrace(f"{where}: its content does not match the hash in its name. Restore it from a backup")
    return contract
