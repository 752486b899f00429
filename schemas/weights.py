"""Weights as a trace keeps them: the bits of every tensor, by policy version.

A writer's versions lie in segments. A segment has one array of bits a dtype, one row a version: the first row is a
keyframe, the bits themselves. Each other row says how the bits of a row before it change: which elements by how much, or where
many change, the bits XOR those of the row just before.
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
"""Bytes an element, for every dtype that can be kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One tensor's place in its segment."""

    name: str
    """As the model's state_dict names it."""
    dtype: str
    """torch's name of it, such as `bfloat16`."""
    shape: tuple[int, ...]
    """Shape of what this writer holds."""
    start: int
    """First element in the array of its dtype; elements follow in row-major order."""
    whole_shape: tuple[int, ...] | None = None
    """Shape of the whole tensor, where several writers hold parts of it."""
    offsets: tuple[int, ...] | None = None
    """Where this part begins in the whole, one per dimension. One number for a whole of another number of dimensions: the part
    is a run of its elements in row-major order (FSDP1), and this is the first."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightLayout:
    """Which tensors a segment holds, and where."""

    tensors: tuple[StoredTensor, ...]
    tied: dict[str, str] = field(default_factory=dict)
    """Name of a tensor that shares its memory with another -> that other, which is kept."""

    @property
    def num_elements(self) -> dict[str, int]:
        """dtype -> elements of its array."""
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
        """Read it from JSON. Raises ValueError for values of other types."""
        return msgspec.convert(values, cls)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightVersion:
    """One version of the weights as one writer kept it; written once all of its chunks are there."""

    version: int
    """Optimizer updates that these weights have seen."""
    segment: str
    """Folder below weights/."""
    row: int
    """Row of the segment's arrays; row 0 is the keyframe."""
    previous: int | None
    """The version in the row before; None for a keyframe."""
    hashes: dict[str, str]
    """Tensor -> SHA-256 of its bytes."""
    num_changed: dict[str, int] | None
    """Tensor -> elements whose bits differ from the version before; None where there is no version before."""
    chunks: dict[str, list[int]]
    """dtype -> chunks that hold something; the others are all zero bits and have no file."""
    chain: str
    """SHA-256 over the chain of the version before and this version's hashes: it names the whole history."""
    num_bytes: int
    """Bytes on disk."""
    stored_at: str
    """When it was written, ISO 8601 in UTC."""
    base_row: int | None = None
    """Row whose elements it changes, a power of 4 before it; None for a keyframe, and for the bits XOR those of the row before."""
    layout_hash: str | None = None
    """XXH3-128 of the segment's zarr.json, which says where each tensor lies; None from releases without checksums."""

    @property
    def is_keyframe(self) -> bool:
        return self.row == 0

    @property
    def parent_row(self) -> int | None:
        """Row that it is rebuilt from; None for a keyframe."""
        if self.is_keyframe:
            return None
        return self.row - 1 if self.base_row is None else self.base_row

    @property
    def writer(self) -> str:
        """The writer whose segment it is in."""
        return self.segment.rpartition("-")[0]

    def to_json(self) -> str:
        return to_document({field.name: getattr(self, field.name) for field in fields(self)})


def parse_weight_version(content: bytes, where: str, *, needs_checksum: bool = False) -> WeightVersion:
    """Read a version's file. Raises DamagedTrace."""
    what = "a version of weights"
    return as_record(read_document(content, where, what, needs_checksum=needs_checksum), WeightVersion, where, what)


def chain_hash(previous: str | None, hashes: Mapping[str, str]) -> str:
    """SHA-256 over the chain before and every tensor's hash, by name."""
    content = "\n".join([previous or "", *(f"{name} {hashes[name]}" for name in sorted(hashes))])
    return sha256(content.encode()).hexdigest()
