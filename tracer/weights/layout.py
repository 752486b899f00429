"""Which tensors a model has, which of them share memory, and which part of each this process holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...schemas.errors import InvalidRecord
from ...schemas.weights import ITEM_BYTES, StoredTensor, WeightLayout


def layout_of(tensors: Mapping[str, Any]) -> WeightLayout:
    """Lay a model's tensors out in one array a dtype; tied ones once.

    Raises InvalidRecord for a dtype that cannot be kept.
    """
    places: dict[str, int] = {}
    stored: list[StoredTensor] = []
    tied: dict[str, str] = {}
    known: dict[Any, str] = {}
    for name, tensor in tensors.items():
        local = local_part(tensor)
        identity = (local.data_ptr(), tuple(local.shape), local.stride(), local.dtype) if local.numel() else name
        if identity in known:
            tied[name] = known[identity]
            continue
        known[identity] = name
        dtype = str(local.dtype).removeprefix("torch.")
        if dtype not in ITEM_BYTES:
            raise InvalidRecord(f"weights: tensor {name!r} is {dtype}; kept can be {', '.join(ITEM_BYTES)}")
        entry = StoredTensor(
            name=name, dtype=dtype, shape=tuple(local.shape), start=places.get(dtype, 0), **_place_in_whole(tensor)
        )
        places[dtype] = entry.start + entry.numel
        stored.append(entry)
    return WeightLayout(tensors=tuple(stored), tied=tied)


def is_sharded(tensor: Any) -> bool:
    """Whether a tensor is spread over processes (a DTensor)."""
    return type(tensor).__name__ == "DTensor" or hasattr(tensor, "device_mesh")


def local_part(tensor: Any) -> Any:
    """What this process holds of a tensor."""
    tensor = tensor.detach()
    return tensor.to_local() if is_sharded(tensor) else tensor


def _place_in_whole(tensor: Any) -> dict[str, Any]:
    if not is_sharded(tensor):
        return {}
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return {"whole_shape": tuple(tensor.shape), "offsets": tuple(offsets)}
