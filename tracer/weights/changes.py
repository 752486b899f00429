"""Sparse encoding of weight updates: which elements in a chunk changed, and by how much.

At a small learning rate, an update changes few of a half-precision model's weights, and most of the changed ones by one
unit in the last place. A change is stored as two numbers: the distance from the previous changed element, and the
difference between the new and the old bits, as unsigned integers with wraparound. Differences from several updates can
be added in any order, and undone.

Shapes: C elements in a chunk, K of them changed, G bytes that encode distances.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numcodecs import Blosc

from ..whole_file import write_whole
from .chunks import bits_type, decoded

Changes = tuple[np.ndarray, np.ndarray]
"""[K] positions of the changed elements in a chunk, ascending, and [K] differences between their new and old bits."""

_LONGEST = 255
"""Byte value that means: add the next byte to the distance."""

_DISTANCES = Blosc(cname="zstd", clevel=1, shuffle=Blosc.NOSHUFFLE)
_DIFFERENCES = Blosc(cname="zstd", clevel=1, shuffle=Blosc.SHUFFLE)


def changes_of(delta_C: np.ndarray, bits_C: np.ndarray) -> Changes:
    """Return the changes in a chunk. `delta_C` is the XOR between its new bits, `bits_C`, and its old ones."""
    places_K = np.flatnonzero(delta_C).astype(np.int32)
    now_K = bits_C[places_K]
    return places_K, now_K - (now_K ^ delta_C[places_K])


def added(several: Sequence[Changes]) -> Changes:
    """Return the sum of several changes to one chunk."""
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
    """Write a chunk's changes. Return the file's size on disk in bytes."""
    places_K, differences_K = changes
    distances_K = np.diff(places_K, prepend=-1)
    num_longest_K = distances_K // _LONGEST
    distances_G = np.full(len(distances_K) + int(num_longest_K.sum()), _LONGEST, np.uint8)
    distances_G[np.cumsum(num_longest_K + 1) - 1] = distances_K - num_longest_K * _LONGEST
    distances = bytes(_DISTANCES.encode(distances_G))
    encoded = len(distances).to_bytes(8, "little") + distances + bytes(_DIFFERENCES.encode(_folded(differences_K)))
    write_whole(path, encoded)
    return len(encoded)


def decode_changes(encoded: bytes, dtype: str, size: int) -> Changes:
    """Decode the changes to a chunk with `size` elements. Raises ValueError."""
    end = 8 + int.from_bytes(encoded[:8], "little")
    kind = np.dtype(bits_type(dtype))
    distances_G = decoded(encoded[8:end], np.dtype(np.uint8), 2 * size)
    folded_K = decoded(encoded[end:], kind, size)
    ends_K = np.flatnonzero(distances_G != _LONGEST)
    if not len(ends_K) or len(ends_K) != len(folded_K) or ends_K[-1] != len(distances_G) - 1:
        raise ValueError("its positions and differences do not match")
    places_K = np.cumsum(distances_G, dtype=np.int64)[ends_K]
    places_K -= 1
    if places_K[0] < 0 or places_K[-1] >= size:
        raise ValueError(f"it changes elements beyond its {size:,}")
    return places_K, _unfolded(folded_K)


def apply_changes(bits_C: np.ndarray, changes: Changes, *, undo: bool = False) -> None:
    """Apply changes to a chunk in place, or undo them."""
    places_K, differences_K = changes
    # This takes half the time of `bits[places] += ...`.
    np.add.at(bits_C, places_K, -differences_K if undo else differences_K)


def _folded(differences_K: np.ndarray) -> np.ndarray:
    """Encode signed integers as unsigned ones by zigzag: 0, -1, 1, -2, ... become 0, 1, 2, 3, ..."""
    high = 8 * differences_K.dtype.itemsize - 1
    return (differences_K << 1) ^ -(differences_K >> high)


def _unfolded(folded_K: np.ndarray) -> np.ndarray:
    return np.asarray((folded_K >> 1) ^ -(folded_K & 1))
