"""What of a trace can be read just now: sealed files, the journals of live or killed writers, and what is damaged."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ..schemas.errors import DamagedTrace
from ..schemas.layout import PASSES, SCORES, SEQUENCES, SUMS, TABLES, Segment
from ..schemas.manifest import Manifest
from ..schemas.sums import KINDS, RUN_QUANTILES, SEQUENCE_SUMS, STEP_QUANTILES
from ..schemas.tables import TABLES as TABLE_SPECS
from ..schemas.tables import Table
from ..schemas.writer_state import WriterState
from ..tracer.adopt import is_alive
from ..tracer.journal import journaled_segments, read_journal
from ..tracer.store import Store

_ATTEMPTS = 5
_MADE_OF = b"tim-trace made of"

Pair = tuple[str, str]
"""Two passes, a and b: d = logprob(a) - logprob(b)."""

Examined = dict[str, tuple[str, ...]]
"""Path of a sealed file that can serve -> the columns that it lacks. A sealed file never changes."""


@dataclass(slots=True, kw_only=True)
class Source:
    """One trace, as it lies there at one moment."""

    store: Store
    run: str
    """Name of the run in the `run` column."""
    manifest: Manifest
    writers: list[WriterState]
    files: dict[str, list[str]] = field(default_factory=dict)
    """Table -> paths of its sealed files."""
    lacking: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Path of a sealed file -> columns that it lacks, being of an earlier release."""
    journals: dict[str, pa.Table] = field(default_factory=dict)
    """Table -> rows that are not sealed yet."""
    sums: dict[str, dict[Pair, str]] = field(default_factory=dict)
    """Kind of sums -> pair -> path of the file that is still right."""
    outdated_sums: dict[tuple[str, Pair], list[str]] = field(default_factory=dict)
    """(kind, pair) -> names of files in sums/ whose columns are of an earlier release: they answer nothing."""
    passes: list[dict[str, Any]] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    """What cannot be read and was passed over, a sentence each."""
    torn_bytes: int = 0
    """Bytes of records that were being appended when their process died, or are being appended now."""
    covered: set[Pair] = field(default_factory=set)
    """Pairs whose kept sums were made from all that can be read now."""
    run_covered: set[Pair] = field(default_factory=set)
    """Those of them whose quantiles over the run are kept as well."""
    segments: list[str] = field(default_factory=list)
    """Sealed segments of the tables that sums are made of, `<table>/<segment>`."""
    examined: Examined = field(default_factory=dict)

    def files_by_columns(self, table: str) -> dict[tuple[str, ...], list[str]]:
        """The sealed files of a table, by the columns that they lack."""
        found: dict[tuple[str, ...], list[str]] = {}
        for path in self.files[table]:
            found.setdefault(self.lacking.get(path, ()), []).append(path)
        return found

    @property
    def is_live(self) -> bool:
        """Whether a writer may still add to the trace."""
        return any(is_alive(writer) for writer in self.writers)


def open_source(url: str, run: str | None = None, *, examined: Examined | None = None) -> Source:
    """Look at a trace. A file that cannot be read is passed over and named in `damaged`.

    `examined` is kept by who looks again and again: sealed files that it knows are not opened another time.

    Raises TraceNotFound, NewerTrace or DamagedTrace when there is no trace to look at.
    """
    store = Store(url)
    manifest = store.manifest()
    known = {} if examined is None else examined
    for _ in range(_ATTEMPTS):
        source = Source(store=store, run=run or store.name, manifest=manifest, writers=[], examined=known)
        try:
            _look(source)
        except FileNotFoundError:  # a segment was sealed between listing and reading: look again
            continue
        return source
    raise DamagedTrace(f"{url}: files vanish while they are read; is the folder being moved or deleted?")


def _look(source: Source) -> None:
    store = source.store
    source.writers, damaged = store.writers()
    source.damaged += damaged
    # Journals come first: what is sealed after this listing is still found below, as Parquet.
    journals = journaled_segments(store)
    for table in TABLES:
        sealed = _sealed(source, table)
        rows = [
            _journal_rows(source, segment, table)
            for segment in journals
            if table in journals[segment] and segment not in sealed
        ]
        rows = [part for part in rows if part is not None]
        if rows:
            source.journals[table] = pa.concat_tables(rows)
    source.segments = [
        f"{table}/{path.rsplit('/', 1)[-1]}" for table in (SEQUENCES, SCORES) for path in source.files[table]
    ]
    _find_sums(source)
    source.passes = _contracts(source)


def _sealed(source: Source, table: str) -> set[Segment]:
    """Note the readable sealed files of a table, and return the segments that have one, readable or not."""
    found = set()
    source.files[table] = []
    for name in source.store.files(table):
        relative = f"{table}/{name}"
        segment = Segment.parse(name.removesuffix(".parquet")) if name.endswith(".parquet") else None
        if segment is None:
            source.damaged.append(f"{source.store.shown(relative)}: no file of a trace; it was passed over, remove it")
            continue
        found.add(segment)
        problem, lacking = None, source.examined.get(relative)
        if lacking is None:
            problem, lacking = _parquet_problem(source.store, relative, TABLE_SPECS[table])
        if problem is None:
            source.examined[relative] = lacking
            source.files[table].append(path := _duckdb_path(source.store, relative))
            source.lacking[path] = lacking
        else:
            source.damaged.append(
                f"{source.store.shown(relative)}: {problem}; its rows are missing from every answer, restore the file "
                "from a copy"
            )
    return found


def _parquet_problem(store: Store, relative: str, spec: Table) -> tuple[str | None, tuple[str, ...]]:
    """Why a Parquet file cannot serve as this table, or None; and the columns that it has not, being older."""
    schema = spec.schema
    try:
        found = _read_schema(store, relative)
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        return f"not readable as Parquet ({str(error).splitlines()[0].rstrip('.')})", ()
    lacking = tuple(name for name in spec.added if name not in found.names)
    missing = [f.name for f in schema if f.name not in (*found.names, *lacking)]
    if missing:
        return f"lacks the columns {', '.join(missing)}", ()
    wrong = [f.name for f in schema if f.name not in lacking and not _same_type(found.field(f.name).type, f.type)]
    return (f"has columns of other types: {', '.join(wrong)}" if wrong else None), lacking


def _read_schema(store: Store, relative: str) -> pa.Schema:
    if store.is_local:
        return pq.read_schema(store.path(relative))
    with store.filesystem.open(store.path(relative), "rb") as file:
        return pq.read_schema(file)


def _same_type(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether two types hold the same values; the names of list elements do not matter."""
    if pa.types.is_list(wanted):
        return bool(pa.types.is_list(found)) and _same_type(found.value_type, wanted.value_type)
    if pa.types.is_map(wanted):
        return bool(pa.types.is_map(found) and (found.key_type, found.item_type) == (wanted.key_type, wanted.item_type))
    return bool(found.equals(wanted))


def _journal_rows(source: Source, segment: Segment, table: str) -> pa.Table | None:
    content = read_journal(source.store, segment, table)
    source.torn_bytes += content.torn_bytes
    schema = TABLE_SPECS[table].schema
    completed = [_completed(batch, schema, TABLE_SPECS[table].added) for batch in content.batches]
    batches = [batch for batch in completed if batch.schema.equals(schema)]
    where = source.store.shown(segment.journal(table))
    if len(batches) < len(content.batches):
        source.damaged.append(f"{where}: holds records of another schema; they were passed over, remove the file")
    if content.torn_bytes and not any(is_alive(w) for w in source.writers if w.writer == segment.writer):
        source.damaged.append(
            f"{where}: its last {content.torn_bytes} bytes are no whole record: the process died while it wrote them; "
            "everything before is read"
        )
    return pa.Table.from_batches(batches, schema) if batches else None


def _completed(batch: pa.RecordBatch, schema: pa.Schema, added: dict[str, pa.DataType]) -> pa.RecordBatch:
    """A batch with NULL in the columns that its writer, being of an earlier release, did not know."""
    names = batch.schema.names
    if not (set(schema.names) - set(names)) <= set(added) or not set(names) <= set(schema.names):
        return batch
    columns = [batch[name] if name in names else pa.nulls(batch.num_rows, added[name]) for name in schema.names]
    return pa.RecordBatch.from_arrays(columns, names=schema.names).cast(schema) if len(names) < len(schema) else batch


def _find_sums(source: Source) -> None:
    """Find, for each pair, the sums made from most of what is still there, and the pairs whose sums hold everything."""
    current = set(source.segments)
    best: dict[tuple[str, Pair], tuple[int, str]] = {}
    for name in source.store.files(SUMS):
        relative = f"{SUMS}/{name}"
        try:
            schema = _read_schema(source.store, relative)
            kind, pair, covers = _made_of(schema)
        except (pa.ArrowException, OSError, ValueError, KeyError):
            source.damaged.append(
                f"{source.store.shown(relative)}: not readable; it was passed over and can be removed"
            )
            continue
        if not (kind in KINDS and schema.remove_metadata().equals(KINDS[kind].schema.remove_metadata())):
            source.outdated_sums.setdefault((kind, pair), []).append(relative)
        elif covers <= current and len(covers) >= best.get((kind, pair), (0, ""))[0]:
            best[kind, pair] = (len(covers), _duckdb_path(source.store, relative))
    unsealed = any(table in source.journals for table in (SEQUENCES, SCORES))
    complete: dict[str, set[Pair]] = {}
    for (kind, pair), (count, path) in best.items():
        source.sums.setdefault(kind, {})[pair] = path
        if count == len(current) and not unsealed:
            complete.setdefault(kind, set()).add(pair)
    source.covered = complete.get(SEQUENCE_SUMS.name, set()) & complete.get(STEP_QUANTILES.name, set())
    source.run_covered = source.covered & complete.get(RUN_QUANTILES.name, set())


def made_of_metadata(kind: str, pair: Pair, segments: list[str]) -> dict[bytes, bytes]:
    """What a file of sums says of itself: its kind, its pair, and the sealed files that it was made from."""
    return {_MADE_OF: json.dumps({"kind": kind, "pair": list(pair), "covers": sorted(segments)}).encode()}


def _made_of(schema: pa.Schema) -> tuple[str, Pair, set[str]]:
    metadata: Mapping[bytes, bytes] = schema.metadata or {}
    content = json.loads(metadata[_MADE_OF])
    a, b = content["pair"]
    return content["kind"], (a, b), set(content["covers"])


def _contracts(source: Source) -> list[dict[str, Any]]:
    """Every contract of every pass."""
    found = []
    for name in source.store.walk(PASSES):
        relative = f"{PASSES}/{name}"
        if not name.endswith(".json"):
            source.damaged.append(f"{source.store.shown(relative)}: no file of a trace; it was passed over, remove it")
            continue
        try:
            content = json.loads(source.store.read_bytes(relative))
            found.append(
                {
                    "run": source.run,
                    "pass": str(content["pass"]),
                    "contract": str(content["contract_hash"]),
                    "engine": content["contract"].get("engine"),
                    "device": content["contract"].get("device"),
                    "contract_json": json.dumps(content["contract"], sort_keys=True),
                }
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            source.damaged.append(f"{source.store.shown(relative)}: not a contract; it was passed over")
    return found


def _duckdb_path(store: Store, relative: str) -> str:
    return store.path(relative) if store.is_local else store.filesystem.unstrip_protocol(store.path(relative))
