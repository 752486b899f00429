"""Write each policy version's weights during training.

Shapes: E elements in all tensors with the same dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from ...schemas.checksums import SealedFile, sealed, whole_hash
from ...schemas.documents import now
from ...schemas.layout import WEIGHTS, Segment
from ...schemas.weights import ITEM_BYTES, WeightLayout, WeightVersion, chain_hash
from ..patience import Patience
from ..whole_file import write_part
from ..worker import Worker
from . import chunks
from .chunks import Bits, Changes
from .layout import layout_of, local_part

VERSIONS_A_KEYFRAME = 16
"""Versions per segment if many elements change. More are added while the deltas together are smaller than the keyframe."""
MOST_A_KEYFRAME = 256

FEW = 1 / 8
"""Maximum fraction of changed elements for sparse storage. Above it, all bits are stored."""
STRIDE = 4
"""Row r stores changes since row r - s, where s is the largest power of STRIDE that divides r."""
MOST_ON_THE_WAY = 0.36
"""Start a new keyframe if rebuilding a version would apply more changes than this share of its elements."""

PINNED_BYTES = 512 << 20
"""Maximum size of a version copied through pinned memory (bytes). The caller waits for the copy of a larger version."""

ENCODERS = 2  # number of compression threads


ChunkChanges = dict[str, list[Changes]]


class WeightWriter:
    """Copies weights to the host, and writes them on a separate thread.

    At most two versions are held in host memory, so a new version waits until the previous one is written. `patience`
    limits this wait.
    """

    def __init__(
        self, folder: Path, writer: str, account: Callable[[dict[str, SealedFile]], None], *,
        versions_a_keyframe: int = VERSIONS_A_KEYFRAME, most_a_keyframe: int = MOST_A_KEYFRAME,
        patience: Patience | None = None,
    ):  # fmt: skip
        self._trace, self.folder = folder, folder / WEIGHTS
        self._account = account
        self.rows, self.most_rows = versions_a_keyframe, most_a_keyframe
        self._stored = self._of_deltas = 0
        self._is_few = True
        self._recent: list[list[ChunkChanges]] = []
        """Changes that are not yet summed, by level: single rows, sums over STRIDE rows, and so on."""
        self._on_the_way: list[int] = []
        """Number of changes needed to rebuild each row from the keyframe."""
        self._segment = Segment(writer, -1)
        self._worker = Worker(max_bytes=0, patience=patience)
        self._encoders = [Worker(max_bytes=0) for _ in range(ENCODERS)]
        self._layout: WeightLayout | None = None
        self._known: tuple[tuple[str, int], ...] = ()
        self._spare: Bits = {}
        self._last: Bits = {}
        self._written: WeightVersion | None = None
        self._version: int | None = None
        self._layout_hash = ""

    @property
    def error(self) -> BaseException | None:
        return self._worker.error

    @property
    def signs(self) -> list[Any]:
        """Values that change while the threads make progress, to tell slow writes from stuck ones."""
        return [worker.signs for worker in (self._worker, *self._encoders)]

    @property
    def cpu_s(self) -> float:
        return sum(worker.cpu_s for worker in (self._worker, *self._encoders))

    def snapshot(self, version: int, tensors: Mapping[str, Any]) -> None:
        """Store a policy version, unless it is stored already.

        `tensors` maps state_dict names to tensors on any device. Returns as soon as the caller may modify them. For CUDA
        tensors, the current stream waits for the copy, but the caller does not, unless the weights exceed PINNED_BYTES.
        Raises InvalidRecord for an unsupported dtype.
        """
        if version == self._version:
            return
        self._version = version
        # If all tensor objects are the same as before, so is the layout.
        known = tuple((name, id(tensor)) for name, tensor in tensors.items())
        layout = layout_of(tensors) if self._layout is None or known != self._known else self._layout
        self._known = known
        self.drain()
        if layout != self._layout:
            self._layout, self._spare, self._last = layout, {}, {}
        bits, wait = _copy(layout, tensors, self._spare)
        self._spare = {}
        self._worker.submit(partial(self._write, version, layout, bits), 1, ready=wait)

    def drain(self) -> None:
        self._worker.drain(signs=lambda: self.signs)

    def close(self, *, signs: Callable[[], Any] | None = None) -> None:
        for worker in (self._worker, *self._encoders):
            worker.close(signs=signs)

    def abandon(self) -> None:
        for worker in (self._worker, *self._encoders):
            worker.abandon()

    def _write(self, version: int, layout: WeightLayout, bits: Bits) -> None:
        last, known = self._last, self._written
        # The delta overwrites the previous copy. The next copy reuses that memory.
        delta = {dtype: np.bitwise_xor(bits[dtype], last[dtype], out=last[dtype]) for dtype in last}
        num_changed = {t.name: int(np.count_nonzero(chunks.part(delta, t))) for t in layout.tensors} if delta else None
        plan = None
        if known is not None and num_changed is not None:
            is_few = sum(num_changed.values()) <= FEW * sum(layout.num_elements.values())
            plan = self._plan(known.row + 1, delta, bits, is_few=is_few)
        follows = plan is not None
        base_row, changes = plan or (None, None)
        row = known.row + 1 if known is not None and follows else 0
        if not follows:
            self._begin_segment(layout)
        hashes = {
            tensor.name: known.hashes[tensor.name]
            if known is not None and num_changed is not None and not num_changed[tensor.name]
            else sha256(chunks.part(bits, tensor).data).hexdigest()
            for tensor in layout.tensors
        }
        indexes, num_bytes = {}, 0
        for dtype, row_E in (delta if follows else bits).items():
            folder = self.folder / self._segment.name / dtype
            if changes is not None:
                indexes[dtype], size = self._write_changes(folder, row, changes[dtype])
            else:
                indexes[dtype], size = chunks.write_row(folder, dtype, row, row_E, self._encoders)
            num_bytes += size
        record = WeightVersion(
            version=version, segment=self._segment.name, row=row,
            previous=known.version if known is not None and follows else None, hashes=hashes, num_changed=num_changed,
            chunks=indexes, chain=chain_hash(known.chain if known is not None else None, hashes), num_bytes=num_bytes,
            stored_at=now(), base_row=base_row, layout_hash=self._layout_hash,
        )  # fmt: skip
        self._write_document(f"{self._segment.name}.{version}.json", record.to_json().encode())
        self._written, self._last, self._spare = record, bits, delta
        self._stored, self._of_deltas = (self._stored, self._of_deltas + num_bytes) if follows else (num_bytes, 0)

    def _plan(
        self, row: int, delta: Bits, bits: Bits, *, is_few: bool
    ) -> tuple[int, ChunkChanges] | tuple[None, None] | None:
        """Return a base row and the changes since it, (None, None) to store a full XOR, or None for a new segment."""
        if not self._is_few or (not is_few and row == 1):
            self._is_few, self._recent = False, []
            has_room = row < self.rows or (self._of_deltas < self._stored and row < self.most_rows)
            return (None, None) if has_room else None
        if not is_few or row >= self.most_rows:
            return None
        changes = {dtype: self._by_chunk(delta[dtype], bits[dtype], dtype) for dtype in delta}
        level = 0
        while row % STRIDE ** (level + 1) == 0:
            together = [*self._recent[level], changes]
            self._recent[level] = []
            for dtype in delta:
                by_chunk = list(zip(*(one[dtype] for one in together), strict=True))
                changes[dtype] = chunks.map_chunks(chunks.added, by_chunk, self._encoders)
            level += 1
        base_row = row - STRIDE**level
        on_the_way = self._on_the_way[base_row] + sum(len(k) for of_dtype in changes.values() for k, _ in of_dtype)
        if on_the_way > MOST_ON_THE_WAY * sum(len(bits_E) for bits_E in bits.values()):
            return None
        self._recent.extend([] for _ in range(level + 1 - len(self._recent)))
        self._recent[level].append(changes)
        self._on_the_way.append(on_the_way)
        return base_row, changes

    def _by_chunk(self, delta_E: np.ndarray, bits_E: np.ndarray, dtype: str) -> list[Changes]:
        size = chunks.chunk_elements(dtype, len(bits_E))

        def find(index: int) -> Changes:
            within = slice(index * size, (index + 1) * size)
            return chunks.changes_of(delta_E[within], bits_E[within])

        return chunks.map_chunks(find, range(-(-len(bits_E) // size)), self._encoders)

    def _write_changes(self, folder: Path, row: int, of_chunks: list[Changes]) -> tuple[list[int], int]:
        def write(index: int) -> int:
            changes = of_chunks[index]
            return chunks.write_changes(folder / chunks.changes_key(row, index), changes) if len(changes[0]) else 0

        return chunks.written_chunks(chunks.map_chunks(write, range(len(of_chunks)), self._encoders))

    def _begin_segment(self, layout: WeightLayout) -> None:
        self._is_few, self._recent, self._on_the_way = True, [[]], [0]
        self._segment = Segment(self._segment.writer, self._segment.number + 1)
        document = chunks.group_document({"layout": asdict(layout)})
        self._layout_hash = whole_hash(document)
        self._write_document(f"{self._segment.name}/{chunks.DOCUMENT}", document)
        for dtype, count in layout.num_elements.items():
            name = f"{self._segment.name}/{dtype}/{chunks.DOCUMENT}"
            self._write_document(name, chunks.array_document(dtype, self.most_rows, count))

    def _write_document(self, name: str, content: bytes) -> None:
        write_part(self._trace, f"{WEIGHTS}/{name}", content)
        self._account({f"{WEIGHTS}/{name}": sealed(content)})


def _copy(layout: WeightLayout, tensors: Mapping[str, Any], spare: Bits) -> tuple[Bits, Callable[[], None] | None]:
    """Copy bits to the host, reusing `spare`. Also return a function that waits for the copy, or None if it is done."""
    import torch

    kinds = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
    on_cuda = any(local_part(tensor).device.type == "cuda" for tensor in tensors.values())
    is_pinned = on_cuda and layout.num_bytes <= PINNED_BYTES
    bits: Bits = {}
    hosts: dict[str, Any] = {}
    for dtype, count in layout.num_elements.items():
        if dtype in spare:
            hosts[dtype] = torch.from_numpy(spare[dtype])
        else:
            hosts[dtype] = torch.empty(count, dtype=kinds[ITEM_BYTES[dtype]], pin_memory=is_pinned)
        bits[dtype] = hosts[dtype].numpy()
    for tensor in layout.tensors:
        source = local_part(tensors[tensor.name])
        target = hosts[tensor.dtype][tensor.start : tensor.start + tensor.numel]
        target.copy_(source.contiguous().view(target.dtype).reshape(-1), non_blocking=on_cuda)
    if not on_cuda:
        return bits, None
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record()
    return bits, copied.synchronize
