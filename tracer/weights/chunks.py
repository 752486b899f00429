"""Bit arrays in Zarr v3 format, one row per version, stored as compressed chunks or sparse changes.

Any Zarr library can read these arrays (core 3.0, codecs `bytes` and `blosc`). They are written without such a library,
because it would take 10 ms and start threads for each array, and threads cannot be started at interpreter exit.

A change is two numbers: the distance from the previous changed element, and the new minus the old bits (unsigned, with
wraparound). Changes from several updates can be added in any order, and undone.

Shapes: R rows (versions), E elements in a row, C elements in a chunk, K changed elements in a chunk, G distance bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numcodecs import Blosc

from ...schemas.weights import ITEM_BYTES, StoredTensor
from ..whole_file import write_whole
from ..worker import Worker

_Given = TypeVar("_Given")
_T = TypeVar("_T")

DOCUMENT = "zarr.json"
CHUNK_BYTES = 16 << 20
BITS: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
Bits = dict[str, np.ndarray]
"""Bits of [E] elements as unsigned integers, keyed by dtype."""
_CODEC = Blosc(cname="zstd", clevel=1, shuffle=Blosc.SHUFFLE)


def bits_type(dtype: str) -> Any:
    return BITS[ITEM_BYTES[dtype]]


def part(bits: Bits, tensor: StoredTensor) -> np.ndarray:
    return bits[tensor.dtype][tensor.start : tensor.start + tensor.numel]


def chunk_elements(dtype: str, num_elements: int) -> int:
    return max(1, min(num_elements, CHUNK_BYTES // ITEM_BYTES[dtype]))


def group_document(attributes: dict[str, Any]) -> bytes:
    return json.dumps({"zarr_format": 3, "node_type": "group", "attributes": attributes}, indent=1).encode()


def array_document(dtype: str, rows: int, num_elements: int) -> bytes:
    document = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [rows, num_elements],
        "data_type": np.dtype(bits_type(dtype)).name,
        "chunk_grid": {
            "name": "regular",
            "configuration": {"chunk_shape": [1, chunk_elements(dtype, num_elements)]},
        },
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 0,
        "codecs": [
            {"name": "bytes", "configuration": {"endian": "little"}},
            {
                "name": "blosc",
                "configuration": {
                    "cname": "zstd", "clevel": 1, "shuffle": "shuffle", "typesize": ITEM_BYTES[dtype], "blocksize": 0,
                },
            },
        ],
        "attributes": {"dtype": dtype},
    }  # fmt: skip
    return json.dumps(document, indent=1).encode()


def write_row(
    folder: Path, dtype: str, row: int, bits_E: np.ndarray, encoders: Sequence[Worker]
) -> tuple[list[int], int]:
    """Write a row on the encoder threads. Return the indexes of its nonzero chunks and their total size (bytes)."""
    size = chunk_elements(dtype, len(bits_E))

    def write(index: int) -> int:
        part_C = bits_E[index * size : (index + 1) * size]
        if not part_C.any():
            return 0
        if len(part_C) < size:
            part_C = np.concatenate([part_C, np.zeros(size - len(part_C), part_C.dtype)])
        encoded = _CODEC.encode(np.ascontiguousarray(part_C))
        write_whole(folder / chunk_key(row, index), encoded)
        return len(encoded)

    return written_chunks(map_chunks(write, range(-(-len(bits_E) // size)), encoders))


def written_chunks(num_bytes: Sequence[int]) -> tuple[list[int], int]:
    return [index for index, size in enumerate(num_bytes) if size], sum(num_bytes)


def map_chunks(work: Callable[[_Given], _T], given: Sequence[_Given], encoders: Sequence[Worker]) -> list[_T]:
    if len(given) <= 1:
        # For a small model, waking another thread would slow training more than encoding the chunk in this thread.
        return [work(one) for one in given]
    found: dict[int, _T] = {}

    def keep(index: int) -> None:
        found[index] = work(given[index])

    for index in range(len(given)):
        encoders[index % len(encoders)].submit(partial(keep, index), 0)
    for encoder in encoders:
        encoder.drain()
        if encoder.error is not None:
            raise encoder.error
    return [found[index] for index in range(len(given))]


def decode_chunk(encoded: bytes, dtype: str, size: int, out_C: np.ndarray | None = None) -> np.ndarray:
    kind = np.dtype(bits_type(dtype))
    if int.from_bytes(encoded[4:8], "little") != size * kind.itemsize:
        raise ValueError(f"the chunk does not contain {size:,} elements of {dtype}")
    return decoded(encoded, kind, size, out_C)


def decoded(encoded: bytes, kind: np.dtype[Any], most: int, out: np.ndarray | None = None) -> np.ndarray:
    # Check the sizes first, because blosc allocates as much memory as the header asks for.
    num_bytes = int.from_bytes(encoded[4:8], "little")
    if len(encoded) < 16 or num_bytes > most * kind.itemsize or num_bytes % kind.itemsize:
        raise ValueError(f"the data must contain a whole number of {kind.itemsize}-byte values, at most {most:,}")
    if int.from_bytes(encoded[12:16], "little") != len(encoded):  # otherwise blosc would read past the end
        raise ValueError(f"the data is incomplete: only {len(encoded):,} bytes")
    try:
        return np.frombuffer(_CODEC.decode(encoded, out), kind)
    except RuntimeError as error:
        raise ValueError(str(error)) from error


def chunk_key(row: int, index: int) -> str:
    return f"c/{row}/{index}"


def changes_key(row: int, index: int) -> str:
    return f"changes/{row}/{index}"


Changes = tuple[np.ndarray, np.ndarray]
"""[K] positions of changed elements, in ascending order, and [K] differences between their new and old bits."""

_LONGEST = 255
"""A distance is stored as one or more bytes that add up to it. A byte with this value is followed by another one."""

_DISTANCES = Blosc(cname="zstd", clevel=1, shuffle=Blosc.NOSHUFFLE)


def changes_of(delta_C: np.ndarray, bits_C: np.ndarray) -> Changes:
    """Return the changes to a chunk, given the XOR of its old and new bits (`delta_C`) and its new bits (`bits_C`)."""
    places_K = np.flatnonzero(delta_C).astype(np.int32)
    now_K = bits_C[places_K]
    return places_K, now_K - (now_K ^ delta_C[places_K])


def added(several: Sequence[Changes]) -> Changes:
    places = np.concatenate([places_K for places_K, _ in several])
    if not len(places):
        return several[0]
    order = np.argsort(places, kind="stable")
    places = places[order]
    first_K = np.flatnonzero(np.diff(places, prepend=-1))
    differences = np.concatenate([differences_K for _, differences_K in several])[order]
    sums_K = np.add.reduceat(differences, first_K, dtype=differences.dtype)
    changed_K = np.flatnonzero(sums_K)
    return places[first_K][changed_K], sums_K[changed_K]


def write_changes(path: Path, changes: Changes) -> int:
    places_K, differences_K = changes
    distances_K = np.diff(places_K, prepend=-1)
    num_longest_K = distances_K // _LONGEST
    distances_G = np.full(len(distances_K) + int(num_longest_K.sum()), _LONGEST, np.uint8)
    distances_G[np.cumsum(num_longest_K + 1) - 1] = distances_K - num_longest_K * _LONGEST
    distances = bytes(_DISTANCES.encode(distances_G))
    encoded = len(distances).to_bytes(8, "little") + distances + bytes(_CODEC.encode(_folded(differences_K)))
    write_whole(path, encoded)
    return len(encoded)


def decode_changes(encoded: bytes, dtype: str, size: int) -> Changes:
    end = 8 + int.from_bytes(encoded[:8], "little")
    kind = np.dtype(bits_type(dtype))
    distances_G = decoded(encoded[8:end], np.dtype(np.uint8), 2 * size)
    folded_K = decoded(encoded[end:], kind, size)
    ends_K = np.flatnonzero(distances_G != _LONGEST)
    if not len(ends_K) or len(ends_K) != len(folded_K) or ends_K[-1] != len(distances_G) - 1:
        raise ValueError("the positions and differences do not match")
    places_K = np.cumsum(distances_G, dtype=np.int64)[ends_K]
    places_K -= 1
    if places_K[0] < 0 or places_K[-1] >= size:
        raise ValueError(f"changes lie beyond the chunk's {size:,} elements")
    return places_K, np.asarray((folded_K >> 1) ^ -(folded_K & 1))  # the inverse of _folded


def apply_changes(bits_C: np.ndarray, changes: Changes, *, undo: bool = False) -> None:
    places_K, differences_K = changes
    # This takes half as long as `bits_C[places_K] += ...`.
    np.add.at(bits_C, places_K, -differences_K if undo else differences_K)


def _folded(differences_K: np.ndarray) -> np.ndarray:
    """Return the differences in zigzag encoding, where 0, -1, 1, -2, ... become 0, 1, 2, 3, ..."""
    high = 8 * differences_K.dtype.itemsize - 1
    return (differences_K << 1) ^ -(differences_K >> high)
