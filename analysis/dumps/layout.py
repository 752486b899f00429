"""Bring a tensor from two dumps into a common layout by joining shards and ordering tokens, or report why this is impossible.

Shapes: T tokens per side, B rows per batch, R ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


class Unmatched(ValueError):
    """Error raised if two tensors cannot be compared; the message states the reason, without the tensors' names."""


@dataclass(frozen=True, slots=True)
class DumpTokens:
    """The tokens in one side's forward, read from input_ids."""

    shape: tuple[int, ...]
    """Shape of input_ids."""
    ids_T: np.ndarray
    """Token ids without padding, row by row."""
    kept_T: np.ndarray
    """Positions of the tokens that are not padding, in the flattened input_ids."""

    @classmethod
    def of(cls, ids: np.ndarray, mask: np.ndarray | None) -> DumpTokens:
        """Create the tokens from input_ids and an attention_mask of the same shape, which is 0 at padding."""
        flat = ids.reshape(-1)
        whole = np.arange(flat.size) if mask is None or mask.shape != ids.shape else np.flatnonzero(mask.reshape(-1))
        return cls(tuple(ids.shape), flat[whole], whole)


def by_token(array: np.ndarray, tokens: DumpTokens) -> np.ndarray | None:
    """Return the tensor as [T, ...], without padding and in token order; None if the tensor has no token axis."""
    num_rows, width = (1, tokens.shape[0]) if len(tokens.shape) == 1 else (tokens.shape[0], math.prod(tokens.shape[1:]))
    shape = array.shape
    rows = [
        axis for axis in ((0, 1), (1, 0)) if array.ndim > 1 and (shape[axis[0]], shape[axis[1]]) == (num_rows, width)
    ]
    if len(rows) == 2 and num_rows > 1:
        raise Unmatched(f"it has {num_rows} rows of {width} tokens: the axes cannot be told apart")
    if rows:
        by_row = array if rows[0] == (0, 1) else array.swapaxes(0, 1)
        return by_row.reshape(num_rows * width, *shape[2:]).take(tokens.kept_T, 0)
    if array.ndim == 4 and (shape[0], shape[2]) == (num_rows, width):  # [B, heads, T, D]
        return array.swapaxes(1, 2).reshape(num_rows * width, *shape[1:2], *shape[3:]).take(tokens.kept_T, 0)
    if array.ndim and shape[0] == num_rows * width:
        return array.take(tokens.kept_T, 0)
    return array if array.ndim and shape[0] == len(tokens.kept_T) else None


def reconciled(
    a: np.ndarray, b: np.ndarray, of_a: DumpTokens | None, of_b: DumpTokens | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return both tensors in the same shape. Raises Unmatched."""
    if of_a is not None and of_b is not None:
        by_a, by_b = by_token(a, of_a), by_token(b, of_b)
        if by_a is not None and by_b is not None:
            return _flat(by_a, by_b)
    a, b = _squeezed(a), _squeezed(b)
    if a.shape == b.shape:
        return a, b
    if a.ndim == b.ndim > 1 and (a.shape[1], a.shape[0], *a.shape[2:]) == b.shape:
        return a, b.swapaxes(0, 1)
    if a.ndim and b.ndim and a.shape[0] == b.shape[0] and a.size == b.size:
        return _flat(a, b)
    if a.size == b.size:
        raise Unmatched(
            f"shapes {_shape(a)} and {_shape(b)}: the order of the tokens is unknown; dump input_ids on both sides"
        )
    raise Unmatched(f"shapes {_shape(a)} and {_shape(b)} do not fit")


def joined(shards: Sequence[np.ndarray], whole: tuple[int, ...]) -> np.ndarray:
    """Join the shards from R ranks into a tensor of shape `whole`, or into the same tensor with tokens laid out differently.
    Raises Unmatched.

    If each shard already has the full shape, all ranks must hold the same bits.
    """
    first = shards[0]
    if len(shards) == 1:
        return first
    target = _without_ones(whole)
    if sorted(_without_ones(first.shape)) == sorted(target) or first.size == math.prod(whole):
        if not all(np.array_equal(first, shard, equal_nan=first.dtype.kind == "f") for shard in shards[1:]):
            raise Unmatched(
                f"{len(shards)} ranks hold different tensors of the whole shape: partial sums that were not reduced, or different data; "
                "give one rank's folder"
            )
        return first
    if any(shard.ndim != first.ndim for shard in shards):
        raise Unmatched(f"{len(shards)} ranks hold tensors of different shapes")
    grown = {axis: shape for axis in range(first.ndim) if (shape := _grown(shards, axis)) is not None}
    axes = [axis for axis, shape in grown.items() if _without_ones(shape) == target] or [
        axis for axis, shape in grown.items() if _fits(shape, axis, whole)
    ]
    if len(axes) != 1:
        why = "fits no axis" if not axes else f"fits {len(axes)} axes"
        raise Unmatched(f"{len(shards)} shards of {_shape(first)} to {tuple(whole)}: joining them {why}")
    return np.concatenate(shards, axes[0])


def _grown(shards: Sequence[np.ndarray], axis: int) -> tuple[int, ...] | None:
    """Return the shape of shards joined along an axis; None if their other axes differ."""
    if len({(*shard.shape[:axis], *shard.shape[axis + 1 :]) for shard in shards}) != 1:
        return None
    shape = shards[0].shape
    return (*shape[:axis], sum(shard.shape[axis] for shard in shards), *shape[axis + 1 :])


def _fits(shape: tuple[int, ...], axis: int, whole: tuple[int, ...]) -> bool:
    """Return True if both shapes can belong to one tensor, with its axes reordered or its tokens flattened."""
    same_axes = sorted(_without_ones(shape)) == sorted(_without_ones(whole))
    is_width = (
        axis == len(shape) - 1 and bool(whole) and shape[-1] == whole[-1] and math.prod(shape) == math.prod(whole)
    )
    return same_axes or is_width


def part(fused: Sequence[np.ndarray], place: int, widths: Sequence[int]) -> list[np.ndarray]:
    """Return the columns of one projection within a fused projection, per rank. `widths` has the width of every projection, in
    order.

    Each rank holds a slice of every projection, side by side. Raises Unmatched.
    """
    num_ranks = len(fused)
    if any(width % num_ranks for width in widths) or any(shard.shape[-1] * num_ranks != sum(widths) for shard in fused):
        raise Unmatched(
            f"{num_ranks} x {fused[0].shape[-1]} columns do not match the projections ({' + '.join(map(str, widths))})"
        )
    start = sum(widths[:place]) // num_ranks
    return [shard[..., start : start + widths[place] // num_ranks] for shard in fused]


def _flat(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Flatten all axes of both tensors after the first."""
    if len(a) != len(b) or a.size != b.size:
        raise Unmatched(f"shapes {_shape(a)} and {_shape(b)} do not fit")
    return a.reshape(len(a), -1), b.reshape(len(b), -1)


def _squeezed(array: np.ndarray) -> np.ndarray:
    return array.reshape(_without_ones(array.shape))


def _without_ones(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _shape(array: np.ndarray) -> str:
    return str(tuple(array.shape))
