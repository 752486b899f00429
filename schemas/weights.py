"""Format of stored weights: the bits of every tensor, for each policy version.

A writer stores its versions in segments. A segment has one array of bits per dtype, with one row per version. The first
row is a keyframe, which holds the full bits. Each later row is a delta: the elements that changed since an earlier row
or, if many changed, the XOR with the bits of the previous version.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Location of one tensor in a segment."""

    name: str
    """The tensor's key in the model's state_dict."""
    dtype: str
    """dtype as named in torch, such as `bfloat16`."""
    shape: tuple[int, ...]
    """Shape of the tensor, or of this writer's shard of it."""
    start: int
    """Index of the first element in the segment's array for the dtype. Elements are in row-major order."""
    whole_shape: tuple[int, ...] | None = None
    """Shape of the whole tensor if several writers store shards of it; else None."""
    offsets: tuple[int, ...] | None = None
    """Start of the shard in the whole tensor, one index per dimension. A single index for a tensor with several
    dimensions means that the shard is a contiguous range of the flattened tensor (FSDP1)."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightLayout:
    tensors: tuple[StoredTensor, ...]
    tied: dict[str, str] = field(default_factory=dict)
    """For each tied tensor, the name of the stored tensor with the same values."""

    @property
    def num_elements(self) -> dict[str, int]:
        """Number of elements per row in the segment's arrays, by dtype."""
        counts: dict[str, int] = {}
        for tensor in self.tensors:
            counts[tensor.dtype] = max(counts.get(tensor.dtype, 0), tensor.start + tensor.numel)
        return counts

    @property
    def num_bytes(self) -> int:
        """Size of one version before compression."""
        return sum(ITEM_BYTES[dtype] * count for dtype, count in self.num_elements.items())

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> WeightLayout:
        return msgspec.convert(values, cls)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightVersion:
    """One version of one writer's weights. This record is written after all chunks of the version."""

    version: int
    """Policy version: the number of optimizer updates that led to these weights."""
    segment: str
    """Folder of the segment, relative to weights/."""
    row: int
    """Row in the segment's arrays; row 0 is the keyframe."""
    previous: int | None
    """Policy version in the previous row; None for a keyframe."""
    hashes: dict[str, str]
    """SHA-256 of each tensor's bytes."""
    num_changed: dict[str, int] | None
    """Number of elements in each tensor that differ from the previous version; None for the first version."""
    chunks: dict[str, list[int]]
    """Indices of the chunks with a non-zero byte, by dtype. All-zero chunks have no file."""
    chain: str
    """SHA-256 of the previous version's chain and this version's hashes, which identifies the whole history."""
    num_bytes: int
    """Size on disk."""
    stored_at: str
    """ISO 8601 in UTC."""
    base_row: int | None = None
    """Row that an element delta refers to, a power of 4 rows earlier; None for a keyframe or an XOR."""
    layout_hash: str
    """XXH3-128 of the segment's zarr.json, which locates the tensors."""

    @property
    def is_keyframe(self) -> bool:
        return self.row == 0

    @property
    def parent_row(self) -> int | None:
        """Row from which the version is reconstructed; None for a keyframe."""
        if self.is_keyframe:
            return None
        return self.row - 1 if self.base_row is None else self.base_row

    @property
    def writer(self) -> str:
        return self.segment.rpartition("-")[0]

    def to_json(self) -> str:
        return to_document({field.name: getattr(self, field.name) for field in fields(self)})


def parse_weight_version(content: bytes, where: str) -> WeightVersion:
    what = "a version of weights"
    return as_record(read_document(content, where, what), WeightVersion, where, what)


def chain_hash(previous: str | None, hashes: Mapping[str, str]) -> str:
    """Return the SHA-256 of the previous version's chain and all tensor hashes, in order of tensor names."""
    content = "\n".join([previous or "", *(f"{name} {hashes[name]}" for name in sorted(hashes))])
    return sha256(content.encode()).hexdigest()
