"""The cache in index/: footers, writer states and contracts. It speeds up opening traces with many files.

Entries are validated before use. Anything missing or changed is read from the trace's own files, so a stale index is
harmless and can be deleted at any time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from ..schemas.checksums import SealedFile, short_hash, whole_hash
from ..schemas.documents import WriterState
from ..schemas.errors import DamagedTrace
from ..schemas.layout import INDEX, PASSES, SCORES, SEQUENCES, SUMS, TABLES, WRITERS
from .parquet_file import ParquetFooter, read_footer
from .store import Store
from .whole_file import write_part

MAX_BYTES = 64 << 20

MANY_FOOTERS = 1024
"""Maximum footers stored per table. Opening a trace reads every stored footer, but most queries need only a few."""

_UNPACKED_BYTES = 2 * MAX_BYTES
"""Maximum size of an uncompressed index (bytes). Larger indexes are ignored."""
_SMALL_FIRST = (*(table for table in TABLES if table not in (SEQUENCES, SCORES)), SUMS, SEQUENCES, SCORES)
"""Order in which tables' footers are added until the index is full."""
_CODEC, _ENDING = "zstd", ".msgpack.zst"
_STATE_FIELDS = tuple(field.name for field in fields(WriterState))


class _State(msgspec.Struct, array_like=True):
    """A writer's state. `versions` is an index into `_Contents.versions`, so that writers can share entries."""

    hash: str
    md5: str
    state: WriterState
    versions: int


class _Footer(msgspec.Struct, array_like=True):
    num_bytes: int
    num_rows: int
    schema: int
    metadata: dict[bytes, bytes]
    content: bytes


class KnownFile(msgspec.Struct, array_like=True):
    """A file that the index lists without its footer."""

    num_bytes: int
    schema: int
    tail_bytes: int
    """Footer size (bytes), including the length field and the magic number."""
    hash: str


class _Contents(msgspec.Struct):
    state_fields: tuple[str, ...] = _STATE_FIELDS
    """Field names in the stored states, which may come from a different release."""
    versions: list[dict[str, str]] = msgspec.field(default_factory=list)
    states: dict[str, _State] = msgspec.field(default_factory=dict)
    schemas: list[bytes] = msgspec.field(default_factory=list)
    footers: dict[str, _Footer] = msgspec.field(default_factory=dict)
    files: dict[str, KnownFile] = msgspec.field(default_factory=dict)
    documents: dict[str, bytes] = msgspec.field(default_factory=dict)


@dataclass(slots=True)
class Index:
    """All index files of a trace, combined. Keys are paths in the trace."""

    states: dict[str, _State] = field(default_factory=dict)
    footers: dict[str, tuple[_Footer, pa.Schema]] = field(default_factory=dict)
    files: list[tuple[dict[str, KnownFile], list[pa.Schema]]] = field(default_factory=list)
    """For each index file: the files whose footers are not in the index, and the schemas that they refer to."""
    documents: dict[str, bytes] = field(default_factory=dict)
    """Contents of files that are named after their hash, by path. The reader verifies the hash."""

    @property
    def paths(self) -> set[str]:
        return {*self.states, *self.footers, *self.documents, *(path for files, _ in self.files for path in files)}

    def known(self, relative: str, num_bytes: int, checksum: str | None) -> tuple[KnownFile, pa.Schema] | None:
        for files, schemas in self.files:
            found = files.get(relative)
            if found is not None and found.num_bytes == num_bytes and found.hash == checksum:
                return found, schemas[found.schema]
        return None

    def footer(self, relative: str, num_bytes: int, checksum: str | None) -> ParquetFooter | None:
        known = self.footers.get(relative)
        if known is None or known[0].num_bytes != num_bytes or short_hash(known[0].content) != checksum:
            return None
        footer, schema = known
        return ParquetFooter(
            num_bytes=num_bytes, num_rows=footer.num_rows, schema=schema, metadata=footer.metadata, content=footer.content,
            hash=checksum,
        )  # fmt: skip

    def state(self, relative: str, *, content: bytes | None = None, md5: str | None = None) -> WriterState | None:
        known = self.states.get(relative)
        if known is None or (md5 != known.md5 if content is None else whole_hash(content) != known.hash):
            return None
        return known.state


def read_index(store: Store) -> Index:
    index = Index()
    for name, size in store.files(INDEX).items():
        if (contents := _contents_of(store, name, size)) is None:
            continue
        schemas = _schemas(contents)
        index.footers |= {path: (footer, schemas[footer.schema]) for path, footer in contents.footers.items()}
        index.files.append((contents.files, schemas))
        index.documents |= contents.documents
        if contents.state_fields == _STATE_FIELDS:
            for known in contents.states.values():
                known.state.versions = contents.versions[known.versions]
            index.states |= contents.states
    return index


def passed_over(store: Store) -> list[str]:
    return [f"{INDEX}/{name}" for name, size in store.files(INDEX).items() if _contents_of(store, name, size) is None]


def _contents_of(store: Store, name: str, size: int) -> _Contents | None:
    if size > MAX_BYTES:
        return None
    try:
        content = store.read_bytes(f"{INDEX}/{name}")
        if f"{whole_hash(content)}{_ENDING}" != name:
            return None
        with pa.CompressedInputStream(pa.BufferReader(content), _CODEC) as stream:
            unpacked = stream.read(_UNPACKED_BYTES)
        contents = msgspec.msgpack.decode(unpacked, type=_Contents)
        _schemas(contents)
    except (OSError, DamagedTrace, pa.ArrowException, msgspec.MsgspecError):
        return None
    fits = all(0 <= known.versions < len(contents.versions) for known in contents.states.values())
    for described in (contents.footers, contents.files):
        fits = fits and all(0 <= known.schema < len(contents.schemas) for known in described.values())
    return contents if fits else None


def _schemas(contents: _Contents) -> list[pa.Schema]:
    return [pa.ipc.read_schema(pa.py_buffer(schema)) for schema in contents.schemas]


def write_index(folder: Path) -> None:
    store = Store(folder)
    before = store.files(INDEX)
    packed = pa.compress(msgspec.msgpack.encode(_IndexBuilder(store).contents), codec=_CODEC, asbytes=True)
    name = f"{whole_hash(packed)}{_ENDING}"
    write_part(folder, f"{INDEX}/{name}", packed)
    for old in before:
        if old != name:
            (folder / INDEX / old).unlink(missing_ok=True)


class _IndexBuilder:
    def __init__(self, store: Store):
        self.contents = _Contents()
        self._store, self._left = store, MAX_BYTES
        self._numbers: dict[bytes, int] = {}
        self._before = read_index(store)
        self._accounts: dict[str, SealedFile] = {}
        for add in (self._states, self._contracts):
            if not all(add()):
                return
        for table in _SMALL_FIRST:
            self._files_of(table)

    def _has_room(self, num_bytes: int) -> bool:
        self._left -= num_bytes
        return self._left >= 0

    def _states(self) -> Iterator[bool]:
        manifest = self._store.manifest()
        for name in self._store.files(WRITERS):
            relative = f"{WRITERS}/{name}"
            try:
                content = self._store.read_json(relative)
                state = self._store.writer(name.removesuffix(".json"), manifest, content)
                number = self._number(self.contents.versions, state.versions, msgspec.msgpack.encode(state.versions))
                state = replace(state, versions={})
                yield self._has_room(len(msgspec.msgpack.encode(state)))
            except (DamagedTrace, OverflowError):  # OverflowError: an integer beyond 64 bits
                continue
            md5 = hashlib.md5(content, usedforsecurity=False).hexdigest()
            self.contents.states[relative] = _State(whole_hash(content), md5, state, number)
            self._accounts |= state.files

    def _contracts(self) -> Iterator[bool]:
        for name in self._store.walk(PASSES):
            content = self._store.read_json(f"{PASSES}/{name}")
            yield self._has_room(len(content))
            self.contents.documents[f"{PASSES}/{name}"] = content

    def _files_of(self, table: str) -> None:
        there = {f"{table}/{name}": size for name, size in self._store.files(table).items()}
        before = {name: file for name, size in there.items() if (file := self._known_before(name, size)) is not None}
        fits = len(there) <= MANY_FOOTERS and sum(file.tail_bytes for file in before.values()) <= self._left
        footers: dict[str, _Footer] | None = {} if fits else None
        files: dict[str, KnownFile] = {}
        left = self._left
        for relative, size in there.items():
            if footers is None and relative in before:
                files[relative] = before[relative]
                continue
            try:
                footer = read_footer(self._store, relative, size)
            except DamagedTrace:
                continue
            number = self._schema(footer.schema)
            files[relative] = KnownFile(size, number, len(footer.content), footer.hash)
            left -= len(footer.content)
            if left < 0:
                footers = None
            if footers is not None:
                footers[relative] = _Footer(size, footer.num_rows, number, footer.metadata, footer.content)
        if footers is not None:
            self.contents.footers |= footers
            self._left = left
        elif self._has_room(len(msgspec.msgpack.encode(files))):
            self.contents.files |= files

    def _known_before(self, relative: str, size: int) -> KnownFile | None:
        record = self._accounts.get(relative)
        found = None if record is None else self._before.known(relative, size, record.footer)
        return None if found is None else msgspec.structs.replace(found[0], schema=self._schema(found[1]))

    def _schema(self, schema: pa.Schema) -> int:
        content = schema.remove_metadata().serialize().to_pybytes()
        return self._number(self.contents.schemas, content, content)

    def _number(self, values: list[Any], value: object, key: bytes) -> int:
        if key not in self._numbers:
            self._numbers[key] = len(values)
            values.append(value)
        return self._numbers[key]
