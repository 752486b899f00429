"""Weights of a recorded version, bit for bit, or a refusal that names what is missing.

Shapes: E elements of all tensors of one dtype in one segment.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256

import numpy as np

from ...schemas.errors import DamagedTrace, WeightsMissing
from ...schemas.layout import WEIGHTS, Segment
from ...schemas.weights import StoredTensor, WeightLayout, WeightVersion, parse_weight_version
from ..store import Store
from .chunks import Bits, bits_type, chunk_elements, chunk_key, decode_chunk, part


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor's bits and what they mean."""

    dtype: str
    """torch's name of it."""
    bits: np.ndarray
    """Unsigned integers in the tensor's shape."""


class WeightReader:
    """Reads the versions of a trace's weights.

    It holds the version that it read last: going from one version to the next applies one delta.
    """

    def __init__(self, store: Store):
        self.store = store
        self.parts: dict[int, list[WeightVersion]] = {}
        """Version -> what each writer kept of it, by segment."""
        self.damaged: list[str] = []
        """Version files that cannot be read."""
        self._layouts: dict[str, WeightLayout] = {}
        self._held: dict[str, tuple[WeightVersion, Bits]] = {}
        for name in sorted(store.files(WEIGHTS)):
            stem, _, version = name.removesuffix(".json").rpartition(".")
            if not name.endswith(".json") or Segment.parse(stem) is None or not version.isdecimal():
                continue
            try:
                record = parse_weight_version(store.read_bytes(f"{WEIGHTS}/{name}").decode(), f"{WEIGHTS}/{name}")
            except DamagedTrace as error:
                self.damaged.append(str(error))
                continue
            self.parts.setdefault(record.version, []).append(record)

    @property
    def versions(self) -> list[int]:
        """The versions that are there, in order."""
        return sorted(self.parts)

    def layout(self, record: WeightVersion) -> WeightLayout:
        """Which tensors a segment holds. Raises DamagedTrace."""
        if record.segment not in self._layouts:
            where = f"{WEIGHTS}/{record.segment}/zarr.json"
            try:
                document = json.loads(self.store.read_bytes(where))
                self._layouts[record.segment] = WeightLayout.from_dict(document["attributes"]["layout"])
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise DamagedTrace(f"{where}: cannot be read ({error}); its versions are lost") from error
        return self._layouts[record.segment]

    def load(self, version: int) -> dict[str, Tensor]:
        """Every tensor of a version by name, tied ones under each name.

        Raises WeightsMissing for a version, or a writer's part of it, that is not there, and DamagedTrace when the
        bits are not those that were recorded.
        """
        if version not in self.parts:
            raise WeightsMissing(f"{self.store.url}: has no weights of version {version}; {self._range()}")
        whole: dict[str, Tensor] = {}
        filled: dict[str, int] = {}
        seen: set[tuple[str, tuple[int, ...]]] = set()
        for record in self.parts[version]:
            layout, bits = self.layout(record), self._bits(record)
            for tensor in layout.tensors:
                if tensor.whole_shape is None:
                    whole[tensor.name] = Tensor(tensor.dtype, part(bits, tensor).reshape(tensor.shape).copy())
                    filled[tensor.name] = tensor.numel
                elif (place := (tensor.name, tensor.offsets or ())) not in seen and tensor.numel:
                    # Processes that replicate each other hold the same part.
                    seen.add(place)
                    filled[tensor.name] = filled.get(tensor.name, 0) + _put(whole, tensor, bits)
        self._check_whole(version, whole, filled)
        for record in self.parts[version]:
            whole |= {name: whole[kept] for name, kept in self.layout(record).tied.items()}
        return whole

    def _bits(self, record: WeightVersion) -> Bits:
        """A writer's bits of a version, compared with their hashes."""
        held = self._held.get(record.segment)
        path = list(self._path(record))
        if held is not None and held[0].row <= record.row and held[0] in path:
            bits, path = held[1], path[path.index(held[0]) + 1 :]
        else:
            bits = self._zeros(record)
        # Other segments of this writer are done with; one version of each writer is held.
        self._held = {name: other for name, other in self._held.items() if other[0].writer != record.writer}
        for step in path:
            self._apply(step, bits)
        try:
            self._compare(record, bits)
        except DamagedTrace:
            self._blame(record)
            raise
        self._held[record.segment] = (record, bits)
        return bits

    def _zeros(self, record: WeightVersion) -> Bits:
        return {dtype: np.zeros(count, bits_type(dtype)) for dtype, count in self.layout(record).num_elements.items()}

    def _path(self, record: WeightVersion) -> Iterator[WeightVersion]:
        """The keyframe and the deltas up to a version, in order. Raises WeightsMissing for one that is not there."""
        same = (kept for parts in self.parts.values() for kept in parts if kept.segment == record.segment)
        by_row = {kept.row: kept for kept in same}
        for row in range(record.row + 1):
            if row not in by_row:
                raise WeightsMissing(
                    f"{self.store.url}: version {record.version} cannot be rebuilt: row {row} of "
                    f"{WEIGHTS}/{record.segment} is missing (its .json file); versions of other segments can"
                )
            yield by_row[row]

    def _apply(self, record: WeightVersion, bits: Bits) -> None:
        for dtype, chunks in record.chunks.items():
            size = chunk_elements(dtype, len(bits[dtype]))
            for index in chunks:
                where = f"{WEIGHTS}/{record.segment}/{dtype}/{chunk_key(record.row, index)}"
                target = bits[dtype][index * size : (index + 1) * size]
                # A keyframe's whole chunks are the bits themselves, and need no room of their own.
                in_place = record.is_keyframe and len(target) == size
                try:
                    part_C = decode_chunk(self.store.read_bytes(where), dtype, target if in_place else None)
                except (OSError, ValueError) as error:
                    what = "keyframe" if record.is_keyframe else "delta"
                    raise DamagedTrace(
                        f"{where}: the {what} of version {record.version} is missing or damaged ({error}); no version "
                        f"of {record.segment} from it on can be rebuilt"
                    ) from error
                if not in_place:
                    np.bitwise_xor(target, part_C[: len(target)], out=target)

    def _compare(self, record: WeightVersion, bits: Bits) -> None:
        for tensor in self.layout(record).tensors:
            if sha256(part(bits, tensor).data).hexdigest() != record.hashes[tensor.name]:
                raise DamagedTrace(
                    f"{WEIGHTS}/{record.segment}: version {record.version}: {tensor.name} is not what was recorded "
                    "(its hash differs); restore the folder from a copy"
                )

    def _blame(self, record: WeightVersion) -> None:
        """Find the first row whose bits are wrong, and raise for it."""
        bits = self._zeros(record)
        for step in self._path(record):
            self._apply(step, bits)
            self._compare(step, bits)

    def _check_whole(self, version: int, whole: dict[str, Tensor], filled: dict[str, int]) -> None:
        for name, count in filled.items():
            if count != whole[name].bits.size:
                held = ", ".join(sorted(record.segment for record in self.parts[version]))
                raise WeightsMissing(
                    f"{self.store.url}: version {version}: {name} has {count:,} of {whole[name].bits.size:,} elements; "
                    f"a writer's part is missing (there: {held})"
                )

    def _range(self) -> str:
        versions = self.versions
        if not versions:
            return "it has none: record with --weights delta, or name checkpoints with --weights-from"
        return f"it has {len(versions):,} of them, {versions[0]} to {versions[-1]}"


def _put(whole: dict[str, Tensor], tensor: StoredTensor, bits: Bits) -> int:
    """Put a writer's part into the whole tensor and return its elements."""
    if tensor.name not in whole:
        whole[tensor.name] = Tensor(tensor.dtype, np.zeros(tensor.whole_shape or (), bits_type(tensor.dtype)))
    place = tuple(
        slice(start, start + length) for start, length in zip(tensor.offsets or (), tensor.shape, strict=True)
    )
    whole[tensor.name].bits[place] = part(bits, tensor).reshape(tensor.shape)
    return tensor.numel
