"""Storage format for weights: every tensor's bits for each policy version.

A segment has one array per dtype and one row per version. The first row is a keyframe (full bits). Later rows are
deltas: the elements that changed since an earlier row or, if many changed, the XOR with the previous version's bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from hashlib import sha256

from .documents import as_record, read_document, to_document

ITEM_BYTES = {
    "float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    name: str
    dtype: str
    shape: tuple[int, ...]
    """Shape of the tensor, or of this writer's shard."""
    start: int
    """Index of the first element in the segment's array for this dtype. Elements are in row-major order."""
    whole_shape: tuple[int, ...] | None = None
    """Full tensor shape, if several writers store shards."""
    offsets: tuple[int, ...] | None = None
    """Index in the full tensor at which the shard starts, per dimension. If there is a single index for a tensor with
    several dimensions, the shard is a contiguous range of the flattened tensor that starts at that index (FSDP1)."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightLayout:
    tensors: tuple[StoredTensor, ...]
    tied: dict[str, str] = field(default_factory=dict)
    """Maps each tied tensor to the stored tensor with the same values."""

    @property
    def num_elements(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for tensor in self.tensors:
            counts[tensor.dtype] = max(counts.get(tensor.dtype, 0), tensor.start + tensor.numel)
        return counts

    @property
    def num_bytes(self) -> int:
        return sum(ITEM_BYTES[dtype] * count for dtype, count in self.num_elements.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightVersion:
    """Index entry for one version of a writer's weights, written after all of that version's chunks."""

    version: int
    segment: str
    row: int
    """Row in the segment's arrays. Row 0 is the keyframe."""
    previous: int | None
    """Policy version in the previous row, or None for a keyframe."""
    hashes: dict[str, str]
    """SHA-256 of each tensor, by tensor name."""
    num_changed: dict[str, int] | None
    """Number of elements changed since the previous version, by tensor name. None for the first version."""
    chunks: dict[str, list[int]]
    """Indices of the chunks with non-zero values, by dtype. All-zero chunks have no file."""
    chain: str
    """SHA-256 over the previous version's `chain` and this version's hashes. It identifies the whole history."""
    num_bytes: int
    stored_at: str
    base_row: int | None = None
    """Base row of an element delta, a power of 4 rows earlier. None for a keyframe or an XOR."""
    layout_hash: str

    @property
    def is_keyframe(self) -> bool:
        return self.row == 0

    @property
    def parent_row(self) -> int | None:
        if self.is_keyframe:
            return None
        return self.row - 1 if self.base_row is None else self.base_row

    @property
    def writer(self) -> str:
        return self.segment.rpartition("-")[0]

    def to_json(self) -> str:
        return to_document({field.name: getattr(self, field.name) for field in fields(self)})


def parse_weight_version(content: bytes, where: str) -> WeightVersion:
    what = "a weight version"
    return as_record(read_document(content, where, what), WeightVersion, where, what)


def chain_hash(previous: str | None, hashes: Mapping[str, str]) -> str:
    content = "\n".join([previous or "", *(f"{name} {hashes[name]}" for name in sorted(hashes))])
    return sha256(content.encode()).hexdigest()
