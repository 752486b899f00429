"""Stored weights: the bits of every tensor, by policy version.

A writer's versions are stored in segments. A segment has one bit array per dtype with one row per version. The first row
is a keyframe with the bits themselves; each later row is a delta: the changed elements relative to an earlier row, or, if
many changed, the bits XOR those of the previous row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from hashlib import sha256
from typing import Any

import msgspec

from .documents import as_record, read_document, to_document

ITEM_BYTES = {
    "float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
"""Bytes per element of every supported dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Location of one tensor in its segment."""

    name: str
    """Key in the model's state_dict."""
    dtype: str
    """torch's name, such as `bfloat16`."""
    shape: tuple[int, ...]
    """Shape of this writer's shard."""
    start: int
    """Index of its first element in the array of its dtype; row-major order."""
    whole_shape: tuple[int, ...] | None = None
    """Shape of the whole tensor, if it is sharded over several writers; else None."""
    offsets: tuple[int, ...] | None = None
    """Start of the shard in the whole tensor, one index per dimension. A single index for a tensor of another rank: the shard
    is a contiguous range of the flattened tensor (FSDP1) starting there."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightLayout:
    """Tensors of a segment and their locations."""

    tensors: tuple[StoredTensor, ...]
    tied: dict[str, str] = field(default_factory=dict)
    """Name of a tied tensor -> the tensor that is stored."""

    @property
    def num_elements(self) -> dict[str, int]:
        """dtype -> number of elements in its array."""
        counts: dict[str, int] = {}
        for tensor in self.tensors:
            counts[tensor.dtype] = max(counts.get(tensor.dtype, 0), tensor.start + tensor.numel)
        return counts

    @property
    def num_bytes(self) -> int:
        """Bytes of one version before compression."""
        return sum(ITEM_BYTES[dtype] * count for dtype, count in self.num_elements.items())

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> WeightLayout:
        """Read it from JSON. Raises ValueError for wrong types."""
        return msgspec.convert(values, cls)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightVersion:
    """One version of one writer's weights; its file is written after all its chunks."""

    version: int
    """Number of optimizer updates in these weights."""
    segment: str
    """Folder below weights/."""
    row: int
    """Row of the segment's arrays; row 0 is the keyframe."""
    previous: int | None
    """Version in the previous row; None for a keyframe."""
    hashes: dict[str, str]
    """Tensor -> SHA-256 of its bytes."""
    num_changed: dict[str, int] | None
    """Tensor -> number of elements that differ from the previous version; None for the first version."""
    chunks: dict[str, list[int]]
    """dtype -> indices of non-zero chunks; all-zero chunks have no file."""
    chain: str
    """SHA-256 of the previous version's chain and this version's hashes; identifies the whole history."""
    num_bytes: int
    """Bytes on disk."""
    stored_at: str
    """When it was written, ISO 8601 in UTC."""
    base_row: int | None = None
    """Base row of an element delta, a power of 4 rows earlier; None for a keyframe or an XOR of the previous row."""
    layout_hash: str | None = None
    """XXH3-128 of the segment's zarr.json, which locates each tensor; None if written without checksums."""

    @property
    def is_keyframe(self) -> bool:
        return self.row == 0

    @property
    def parent_row(self) -> int | None:
        """Row from which it is reconstructed; None for a keyframe."""
        if self.is_keyframe:
            return None
        return self.row - 1 if self.base_row is None else self.base_row

    @property
    def writer(self) -> str:
        """Writer of its segment."""
        return self.segment.rpartition("-")[0]

    def to_json(self) -> str:
        return to_document({field.name: getattr(self, field.name) for field in fields(self)})


def parse_weight_version(content: bytes, where: str, *, needs_checksum: bool = False) -> WeightVersion:
    """Read a version's file. Raises DamagedTrace."""
    what = "a version of weights"
    return as_record(read_document(content, where, what, needs_checksum=needs_checksum), WeightVersion, where, what)


def chain_hash(previous: str | None, hashes: Mapping[str, str]) -> str:
    """Return the SHA-256 of the previous chain and every tensor's hash, sorted by name."""
    content = "\n".join([previous or "", *(f"{name} {hashes[name]}" for name in sorted(hashes))])
    return sha256(content.encode()).hexdigest()
