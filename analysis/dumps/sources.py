"""Find and read the dumped tensors that make up one compared tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .folder import DumpFolder, Spot
from .layout import Unmatched, joined, part
from .names import OUTPUT, TensorPlace

FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
"""Fused projection -> the projections it computes side by side."""
_INTERLEAVED = ("linear_qkv", "query_key_value")
"""Names of fused projections that store queries, keys and values interleaved by group."""
_NORMS = ("input_layernorm", "post_attention_layernorm", "norm")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSource:
    """The dumped tensors that make up one compared tensor on one side."""

    spots: tuple[Spot, ...]
    """Keys of the dumped tensors; several tensors are summed."""
    part: int | None = None
    """Index of the projection within a fused projection; None if the whole tensor is used."""
    widths_of: tuple[Spot, ...] = ()
    """Projections dumped by the other side, whose widths determine where the fused projection is split; empty if all widths
    are equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One comparison between the tensors dumped at the same place in the same forward on both sides."""

    place: TensorPlace
    forward: int
    call: int
    a: TensorSource
    b: TensorSource


def pairs(a: DumpFolder, b: DumpFolder) -> list[Pair]:
    """Match the tensors that both sides dumped, in forward order."""
    found = [
        Pair(place=spot.place, forward=spot.forward, call=spot.call, a=of_a, b=of_b)
        for spot in dict.fromkeys([*_wanted(a, b), *_wanted(b, a)])
        if (of_a := _source(spot, a, b)) is not None and (of_b := _source(spot, b, a)) is not None
    ]
    side = "a" if a.order else "b" if b.order else None
    folder = {"a": a, "b": b}.get(side or "")

    def number(pair: Pair) -> int:
        source = pair.a if side == "a" else pair.b
        numbers = [folder.spots[spot][0].number for spot in source.spots] if folder is not None else []
        return min((each for each in numbers if each is not None), default=0)

    return sorted(found, key=lambda pair: (pair.forward, number(pair), pair.place.order(), pair.call))


def _wanted(side: DumpFolder, other: DumpFolder) -> list[Spot]:
    """Return the places to compare on a side. A fused projection is split if the other side dumped separate projections or
    sharded the projection differently."""
    wanted = []
    for spot, entries in side.spots.items():
        names = FUSED.get(spot.place.module, ()) if spot.place.slot == OUTPUT else ()
        same = other.spots.get(spot)
        if not names or (same is not None and (len(same) == len(entries) or len(names) == 3)):
            wanted.append(spot)
        else:
            wanted += [_at(spot, module) for module in names]
    return wanted


def _source(spot: Spot, side: DumpFolder, other: DumpFolder) -> TensorSource | None:
    """Return the source of a side's tensor at a place; None if the side did not dump the tensor."""
    if spot in side.spots and _is_same_product(spot, side, other):
        second = _second(spot)
        adds = second is not None and second in side.spots and second not in other.spots
        return TensorSource(spots=(spot, second) if adds and second is not None else (spot,))
    for module, names in FUSED.items():
        if spot.place.slot == OUTPUT and spot.place.module in names and (fused := _at(spot, module)) in side.spots:
            widths = tuple(_at(spot, name) for name in names) if len(names) == 3 else ()
            if all(width in other.spots for width in widths):
                return TensorSource(spots=(fused,), part=names.index(spot.place.module), widths_of=widths)
    if (
        spot.place.module == "mlp.product"
        and (product := _at(spot, "mlp.act_fn")) in side.spots
        and _is_fused(spot, side)
    ):
        return TensorSource(spots=(product,))
    return None


def _is_same_product(spot: Spot, side: DumpFolder, other: DumpFolder) -> bool:
    """Return True if `act_fn` means the same on both sides: silu(gate) * up after a fused projection, else silu(gate)."""
    return spot.place.module != "mlp.act_fn" or _is_fused(spot, side) == _is_fused(spot, other)


def _is_fused(spot: Spot, side: DumpFolder) -> bool:
    return _at(spot, "mlp.gate_up_proj") in side.spots


def _second(spot: Spot) -> Spot | None:
    """Return the residual, which engines add to a branch's output inside the next norm, but transformers before the norm."""
    place = spot.place
    if place.layer is not None and not place.module and place.slot == OUTPUT:
        return Spot(TensorPlace(place.layer, "", "output.1"), spot.forward, spot.call)
    if place.module in _NORMS and place.slot == "input.0":
        return Spot(TensorPlace(place.layer, place.module, "input.1"), spot.forward, spot.call)
    return None


def _at(spot: Spot, module: str) -> Spot:
    return Spot(TensorPlace(spot.place.layer, module, OUTPUT), spot.forward, spot.call)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """The shards of one tensor on all ranks of a side."""

    values: list[np.ndarray]
    name: str
    dtype: str
    is_float: bool
    unit: float
    """Unit roundoff of the tensor's dtype; 0 for integers."""
    held_unit: float
    """Unit roundoff of the coarsest dtype that represents the values exactly."""


def shards(source: TensorSource, side: DumpFolder, other: DumpFolder) -> Shards:
    """Read the dumped tensors of a source, one per rank. Raises Unmatched and ImportFailed."""
    entries = [side.spots[spot] for spot in source.spots]
    values = [[side.read(entry) for entry in each] for each in entries]
    first = values[0]
    arrays = [value.array for value in first]
    name = " + ".join(each[0].name for each in entries)
    if len(values) == 2 and [value.array.shape for value in values[1]] == [array.shape for array in arrays]:
        arrays = [one.array + two.array for one, two in zip(*values, strict=True)]
    elif len(values) == 2:
        name = entries[0][0].name
    if source.part is not None:
        if len(source.widths_of) == 3 and any(mark in entries[0][0].name for mark in _INTERLEAVED):
            raise Unmatched(
                "its queries, keys and values are stored group by group, and dumps do not record the number of groups; dump them after the split"
            )
        arrays = part(arrays, source.part, _widths(source, arrays, other))
    is_float = all(value.is_float for value in first)
    return Shards(
        values=arrays, name=name, dtype=first[0].dtype, is_float=is_float,
        unit=max(value.unit for value in first) if is_float else 0.0,
        held_unit=max(value.held_unit for value in first) if is_float else 0.0,
    )  # fmt: skip


def _widths(source: TensorSource, fused: Sequence[np.ndarray], other: DumpFolder) -> list[int]:
    if not source.widths_of:
        return [sum(shard.shape[-1] for shard in fused) // 2] * 2
    return [sum(other.read(entry).array.shape[-1] for entry in other.spots[spot]) for spot in source.widths_of]


def whole(a: list[np.ndarray], b: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the tensors of both sides, each joined from the shards of all ranks. Raises Unmatched."""
    a, b = _one_of_equals(a), _one_of_equals(b)
    if len(a) > 1 and len(b) > 1:
        a, b = [np.concatenate(a, -1)], [np.concatenate(b, -1)]
    return joined(a, b[0].shape), joined(b, a[0].shape) if len(a) == 1 else b[0]


def _one_of_equals(values: list[np.ndarray]) -> list[np.ndarray]:
    first = values[0]
    same = all(np.array_equal(first, value, equal_nan=first.dtype.kind == "f") for value in values[1:])
    return values[:1] if same else values
