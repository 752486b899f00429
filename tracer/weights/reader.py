"""Read recorded policy versions, bit for bit.

Shapes: N elements in a tensor, C elements in a chunk.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from itertools import takewhile

import msgspec
import numpy as np

from ...schemas.checksums import whole_hash
from ...schemas.documents import WriterState
from ...schemas.errors import DamagedTrace, TimTraceError, WeightsMissing, option
from ...schemas.layout import WEIGHTS, WRITERS, Segment
from ...schemas.weights import ITEM_BYTES, StoredTensor, WeightLayout, WeightVersion, parse_weight_version
from ..store import Store, damaged, first_line, too_large, unreadable
from . import chunks

SUPPLIES = "record with --weights delta, attach a folder (tim-trace weights RUN --attach VERSION DIR)"


@dataclass(frozen=True, slots=True)
class Tensor:
    dtype: str
    bits: np.ndarray
    """The elements' bits as unsigned integers, with the tensor's shape."""


class LazyTensor(Tensor):
    __slots__ = ("_read",)

    def __init__(self, dtype: str, read: Callable[[], np.ndarray]):
        object.__setattr__(self, "dtype", dtype)
        object.__setattr__(self, "_read", read)

    @property
    def bits(self) -> np.ndarray:  # type: ignore[override]
        return self._read()  # type: ignore[no-any-return, attr-defined]


class WeightReader:
    """Reads a trace's policy versions.

    The last version read stays in memory, so that reading the next one needs only a delta. There are two exceptions:
    the first version read, because it may be the only one, and versions larger than half the machine's memory.
    """

    most_held = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2

    def __init__(self, store: Store, writers: Sequence[WriterState] = (), *, checkpoints: str | None = None):
        self.store = store
        self.checkpoints = checkpoints
        self.damaged: list[str] = []
        self._by_attempt: dict[int, dict[int, list[WeightVersion]]] = {}
        self._lost: dict[tuple[int, int], str] = {}
        """For each version and attempt, a sentence that names the damaged or missing file."""
        self._layouts: dict[str, WeightLayout] = {}
        self._held: dict[tuple[str, str, int], tuple[WeightVersion, np.ndarray]] = {}
        """The version in memory and its bits, for each segment, dtype and chunk."""
        self._rows_read: dict[str, set[tuple[str, int]]] = {}
        self._counts: dict[str, dict[str, int]] = {}
        self._paths: dict[tuple[str, int], list[WeightVersion]] = {}
        self._chunk_sets: dict[tuple[str, int], dict[str, frozenset[int]]] = {}
        known = {state.writer: state for state in writers if not state.is_removed}
        passed_over = {state.writer for state in writers if state.is_removed} | (store.arriving_writers() - set(known))
        names = store.files(WEIGHTS)
        for name in sorted(names):
            if (segment := _segment_of(name)) is not None and segment.writer not in passed_over:
                self._note(name, segment, known)
        for state in known.values():
            for path in state.files:
                folder, _, name = path.partition("/")
                if folder == WEIGHTS and _segment_of(name) is not None and name not in names:
                    self._note_lost(name, f"{store.shown(path)} is missing. Restore the file from a backup", state)

    def _note(self, name: str, segment: Segment, known: Mapping[str, WriterState]) -> None:
        where = self.store.shown(f"{WEIGHTS}/{name}")
        try:
            record = parse_weight_version(self.store.read_json(f"{WEIGHTS}/{name}"), where)
        except (DamagedTrace, OSError) as error:
            told = str(unreadable(where, error) if isinstance(error, OSError) else error)
            self._note_lost(name, told, known.get(segment.writer))
            return
        if name != f"{record.segment}.{record.version}.json":
            self.damaged.append(f"{where} has the content of {record.segment}.{record.version}.json; remove it")
            return
        writer = known.get(segment.writer)
        if writer is None:
            state = self.store.shown(f"{WRITERS}/{segment.writer}.json")
            told = f"{where} is ignored, because {state} is missing or damaged. Restore that file from a backup"
            self._note_lost(name, told, None)
            return
        self._by_attempt.setdefault(record.version, {}).setdefault(_attempt(writer), []).append(record)

    def _note_lost(self, name: str, told: str, writer: WriterState | None) -> None:
        self.damaged.append(told)
        version = name.removesuffix(".json").rpartition(".")[2]
        if version.isdecimal():
            self._lost[int(version), _attempt(writer)] = told

    @property
    def parts(self) -> dict[int, list[WeightVersion]]:
        """The records of each version's newest attempt, one per writer."""
        return {version: self._parts(version, None) for version in self.versions}

    @property
    def versions(self) -> list[int]:
        return sorted(self._by_attempt)

    def attempts(self, version: int) -> list[int]:
        """Return the attempts that stored a version. 0 means that the attempt is unknown."""
        return sorted(self._by_attempt[version])

    def _parts(self, version: int, attempt: int | None) -> list[WeightVersion]:
        return self._by_attempt[version][self._chosen(version, attempt)]

    def _chosen(self, version: int, attempt: int | None) -> int:
        attempts = self._by_attempt[version]
        return attempt if attempt in attempts else max(attempts)

    def layout(self, record: WeightVersion) -> WeightLayout:
        if record.segment not in self._layouts:
            relative = f"{WEIGHTS}/{record.segment}/{chunks.DOCUMENT}"
            where = self.store.shown(relative)
            try:
                found = _layout(self.store.read_json(relative), record.layout_hash)
            except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
                raise DamagedTrace(
                    f"{where} cannot be read ({first_line(error)}); the versions in this folder are lost"
                ) from error
            self._layouts[record.segment] = found
        return self._layouts[record.segment]

    def load(self, version: int, attempt: int | None = None, *, is_lazy: bool = False) -> dict[str, Tensor]:
        """Load a version's tensors by name. A tied tensor appears under all its names.

        The newest training attempt is read by default. With `is_lazy`, tensors are read and verified on access. Access
        them before loading another version. Raises WeightsMissing if any writer's part is missing, and DamagedTrace if
        the bits differ from the recorded ones.
        """
        if version not in self._by_attempt:
            of = f" of version {version}" if self.versions else ""
            raise WeightsMissing(f"{self.store.url} has no weights{of}; {self._range()}")
        for told in (self._lost.get((version, made)) for made in (self._chosen(version, attempt), 0)):
            if told is not None:
                raise DamagedTrace(told)
        try:
            return self._tensors(self._parts(version, attempt), is_lazy)
        except (ValueError, KeyError, IndexError, TypeError) as error:
            if isinstance(error, TimTraceError):
                raise
            what = f"the files of version {version} contradict each other ({first_line(error)})"
            raise damaged(f"{self.store.shown(WEIGHTS)}: {what}") from error

    def damaged_parts(self, version: int, attempt: int | None = None) -> list[str]:
        found = []
        for record in self._parts(version, attempt):
            try:
                for tensor in self.layout(record).tensors:
                    self._read(record, tensor)
            except (TimTraceError, ValueError, KeyError, IndexError, TypeError) as error:
                found.append(str(error))
            try:  # decode this version's own chunks too, in case earlier versions are lost
                for dtype, indexes in self._chunks_of(record).items():
                    for index in indexes:
                        self._apply(record, dtype, index, self._empty(record, dtype, index))
            except TimTraceError as error:
                found.append(str(error))
        return found

    def _tensors(self, parts: list[WeightVersion], is_lazy: bool) -> dict[str, Tensor]:
        places: dict[str, dict[tuple[int, ...], tuple[WeightVersion, StoredTensor]]] = {}
        tied: dict[str, str] = {}
        segments = {record.segment for record in parts}
        self._held = {key: held for key, held in self._held.items() if key[0] in segments}
        for record in parts:
            layout = self.layout(record)
            tied |= layout.tied
            for tensor in layout.tensors:
                # Several processes may hold replicas of the same shard. Keep only the first.
                if tensor.whole_shape is None or tensor.numel:
                    places.setdefault(tensor.name, {}).setdefault(tensor.offsets or (), (record, tensor))
        found: dict[str, Tensor] = {}
        for name, by_place in places.items():
            own = list(by_place.values())
            shape = own[0][1].whole_shape
            count = sum(tensor.numel for _, tensor in own)
            if shape is not None and count != math.prod(shape):
                held = ", ".join(sorted(record.segment for record in parts))
                raise WeightsMissing(
                    f"{self.store.url}: version {parts[0].version}: {name} has only {count:,} of {math.prod(shape):,} "
                    f"elements, because some writers' files are missing (found: {held}). Restore them from a backup"
                )
            found[name] = LazyTensor(own[0][1].dtype, partial(self._assembled, own))
        if not is_lazy:
            found = {name: Tensor(tensor.dtype, tensor.bits) for name, tensor in found.items()}
        return found | {name: found[kept] for name, kept in tied.items()}

    def _assembled(self, parts: list[tuple[WeightVersion, StoredTensor]]) -> np.ndarray:
        first = parts[0][1]
        if first.whole_shape is None:
            return self._read(*parts[0]).reshape(first.shape)
        whole = np.zeros(first.whole_shape, chunks.bits_type(first.dtype))
        for record, tensor in parts:
            # An FSDP1 shard is a contiguous range of the flattened tensor's elements.
            target = whole if len(tensor.offsets or ()) == whole.ndim else whole.reshape(-1)
            offsets = zip(tensor.offsets or (), tensor.shape, strict=True)
            place = tuple(slice(start, start + length) for start, length in offsets)
            target[place] = self._read(record, tensor).reshape(tensor.shape)
        return whole

    def _read(self, record: WeightVersion, tensor: StoredTensor) -> np.ndarray:
        size = self._chunk_size(record, tensor.dtype)
        found_N = np.zeros(tensor.numel, chunks.bits_type(tensor.dtype))
        end = tensor.start + tensor.numel
        for index in range(tensor.start // size, -(-end // size)):
            first, last = max(tensor.start, index * size), min(end, (index + 1) * size)
            chunk_C = self._chunk(record, tensor.dtype, index)
            found_N[first - tensor.start : last - tensor.start] = chunk_C[first - index * size : last - index * size]
        if sha256(found_N.data).hexdigest() == record.hashes.get(tensor.name):
            return found_N
        self._held.clear()
        for step in self._path(record)[:-1]:
            self._read(step, tensor)  # an error here names the first damaged version
        raise damaged(f"{self._shown(record)}: version {record.version}: {tensor.name} is damaged (hash mismatch)")

    def _chunk(self, record: WeightVersion, dtype: str, index: int) -> np.ndarray:
        key, path = (record.segment, dtype, index), self._path(record)
        held = self._held.pop(key, None)
        chunk_C = None if held is None else self._moved(*held, path, dtype, index)
        if chunk_C is None:
            chunk_C = self._empty(record, dtype, index)
            for step in path:
                self._apply(step, dtype, index, chunk_C)
        # Do not keep the first version read, because it may be the only one.
        rows = self._rows_read.setdefault(record.writer, set())
        rows.add((record.segment, record.row))
        num_bytes = sum(ITEM_BYTES[kind] * count for kind, count in self._elements(record).items())
        if len(rows) == 1 or num_bytes > self.most_held:
            self._held.clear()
        self._held[key] = record, chunk_C
        return chunk_C

    def _moved(
        self, held: WeightVersion, chunk_C: np.ndarray, path: list[WeightVersion], dtype: str, index: int
    ) -> np.ndarray | None:
        """Turn a chunk of version `held` into the same chunk of the last version in `path`.

        Undoes changes back to the two versions' common ancestor, and then applies the changes that follow it in `path`.
        Returns None if that is not possible.
        """
        try:
            held_path = self._path(held)
            shared = sum(1 for _ in takewhile(lambda pair: pair[0] is pair[1], zip(held_path, path, strict=False)))
            if not shared or any(step.base_row is None for step in held_path[shared:]):
                return None
            for step in held_path[shared:]:
                self._apply(step, dtype, index, chunk_C, undo=True)
            for step in path[shared:]:
                self._apply(step, dtype, index, chunk_C)
        except (DamagedTrace, WeightsMissing):
            return None  # the caller then starts at the keyframe, and reports the damage
        return chunk_C

    def _shown(self, record: WeightVersion) -> str:
        return self.store.shown(f"{WEIGHTS}/{record.segment}")

    def _chunk_size(self, record: WeightVersion, dtype: str) -> int:
        return chunks.chunk_elements(dtype, self._elements(record)[dtype])

    def _elements(self, record: WeightVersion) -> dict[str, int]:
        if record.segment not in self._counts:
            self._counts[record.segment] = self.layout(record).num_elements
        return self._counts[record.segment]

    def _empty(self, record: WeightVersion, dtype: str, index: int) -> np.ndarray:
        size = self._chunk_size(record, dtype)
        return np.zeros(min(size, self._elements(record)[dtype] - index * size), chunks.bits_type(dtype))

    def _path(self, record: WeightVersion) -> list[WeightVersion]:
        key = record.segment, record.row
        if key in self._paths:
            return self._paths[key]
        every = (kept for attempts in self._by_attempt.values() for parts in attempts.values() for kept in parts)
        by_row = {kept.row: kept for kept in every if kept.segment == record.segment}
        path, parent = [record], record.parent_row
        while parent is not None:
            if parent not in by_row:
                raise WeightsMissing(
                    f"{self.store.url}: version {record.version} cannot be rebuilt, because the .json file for row "
                    f"{parent} in {WEIGHTS}/{record.segment} is missing; versions that do not need this row can still "
                    f"be rebuilt"
                )
            if parent >= path[-1].row:
                change = f"row {path[-1].row} is recorded as a change to row {parent}, which is not an earlier row"
                raise damaged(f"{self._shown(record)}: {change}")
            path.append(by_row[parent])
            parent = path[-1].parent_row
        self._paths[key] = path[::-1]
        return self._paths[key]

    def _chunks_of(self, record: WeightVersion) -> dict[str, frozenset[int]]:
        key = record.segment, record.row
        if key not in self._chunk_sets:
            counts = self._elements(record)
            for dtype, indexes in record.chunks.items():
                num_chunks = -(-max(counts[dtype], 1) // self._chunk_size(record, dtype)) if dtype in counts else 0
                if len(set(indexes)) != len(indexes) or not all(0 <= index < num_chunks for index in indexes):
                    where = f"{self._shown(record)}: version {record.version}"
                    raise damaged(f"{where} has duplicate chunks of {dtype}, or chunks beyond its tensors")
            self._chunk_sets[key] = {dtype: frozenset(indexes) for dtype, indexes in record.chunks.items()}
        return self._chunk_sets[key]

    def _apply(self, record: WeightVersion, dtype: str, index: int, target: np.ndarray, *, undo: bool = False) -> None:
        """Apply a version's stored chunk to `target`. Only sparse changes can be undone."""
        if index not in self._chunks_of(record).get(dtype, ()):
            return
        size = self._chunk_size(record, dtype)
        is_changes = record.base_row is not None and not record.is_keyframe
        key = (chunks.changes_key if is_changes else chunks.chunk_key)(record.row, index)
        relative = f"{WEIGHTS}/{record.segment}/{dtype}/{key}"
        # A full-size keyframe chunk is decoded straight into the target.
        in_place = record.is_keyframe and len(target) == size
        try:
            encoded = self.store.read_bytes(relative)
            if is_changes:
                chunks.apply_changes(target, chunks.decode_changes(encoded, dtype, len(target)), undo=undo)
                return
            part_C = chunks.decode_chunk(encoded, dtype, size, target if in_place else None)
        except (OSError, ValueError) as error:
            what = "keyframe" if record.is_keyframe else "delta"
            raise DamagedTrace(
                f"{self.store.shown(relative)}: the {what} for version {record.version} is missing or damaged "
                f"({error}); versions in {record.segment} that depend on it cannot be rebuilt"
            ) from error
        if not in_place:
            np.bitwise_xor(target, part_C[: len(target)], out=target)

    @property
    def told_checkpoints(self) -> str:
        return (
            f"they are in separate checkpoints, in {self.checkpoints!r} at the time of recording; to read them, "
            f"pass {option('weights_from', 'DIR')}, or set TIM_TRACE_WEIGHTS_FROM=DIR for commands without that option"
        )

    def _range(self) -> str:
        versions = self.versions
        if not versions and self.checkpoints is not None:
            return self.told_checkpoints
        if not versions:
            return (
                f"none were recorded. To add some, {SUPPLIES}, or pass checkpoints with {option('weights_from', 'DIR')}"
            )
        return f"it has {len(versions):,} versions, {versions[0]} to {versions[-1]}"


def _attempt(writer: WriterState | None) -> int:
    return 0 if writer is None or writer.attempt is None else writer.attempt


def _segment_of(name: str) -> Segment | None:
    stem, _, version = name.removesuffix(".json").rpartition(".")
    return Segment.parse(stem) if name.endswith(".json") and version.isdecimal() else None


def _layout(content: bytes, expected: str) -> WeightLayout:
    if expected != whole_hash(content):
        raise ValueError("the content has changed since it was written")
    found = msgspec.convert(json.loads(content)["attributes"]["layout"], WeightLayout)
    if len({tensor.name for tensor in found.tensors}) != len(found.tensors):
        raise ValueError("a tensor is listed twice")
    for tensor in found.tensors:
        sizes = (*tensor.shape, *(tensor.whole_shape or ()), *(tensor.offsets or ()), tensor.start)
        if any(size < 0 for size in sizes) or tensor.dtype not in ITEM_BYTES:
            raise ValueError(f"{tensor.name} has an invalid layout: {tensor.dtype} of shape {tensor.shape}")
    num_bytes = [math.prod(t.whole_shape or t.shape) * ITEM_BYTES[t.dtype] for t in found.tensors]
    # Tensors are read one by one, so they need not fit into memory together.
    needed = max(2 * max(num_bytes, default=0), sum(num_bytes) // 16)
    if (said := too_large(needed, times=1)) is not None:
        raise ValueError(said)
    return found
