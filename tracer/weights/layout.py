"""Lay out a model's tensors for storage, including tied tensors and this process's shards."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ...schemas.errors import InvalidRecord
from ...schemas.weights import ITEM_BYTES, StoredTensor, WeightLayout

_WRAPPERS = {"_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
"""Names of wrapper modules, which are left out of the tensor names in a state_dict."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlatPart:
    """This process's shard of a parameter flattened by FSDP1: a contiguous range in row-major order."""

    values: Any
    start: int
    shape: tuple[int, ...]
    requires_grad: bool
    is_replicated: bool

    @property
    def dtype(self) -> Any:
        return self.values.dtype

    def numel(self) -> int:
        """Return the whole parameter's number of elements, like DTensor.numel."""
        return math.prod(self.shape)

    def element_size(self) -> int:
        return int(self.values.element_size())

    def detach(self) -> FlatPart:
        return self


def model_tensors(model: Any) -> dict[str, Any]:
    """Return the tensors of a model's state_dict as this process holds them: whole tensors, DTensors and FlatParts.

    state_dict() is never called, because under FSDP its hooks call collectives that other processes would not join.
    """
    sharded = _sharded(model)
    tensors: dict[str, Any] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        named: dict[str, Any] = {}
        module._save_to_state_dict(named, "", True)
        named.pop("_flat_param", None)  # FSDP1's flat parameter, which replaces the module's own parameters
        prefix = "".join(f"{part}." for part in path.split(".") if part and part not in _WRAPPERS)
        named |= sharded.get(module, {})
        tensors |= {prefix + name: tensor for name, tensor in named.items() if hasattr(tensor, "detach")}
    return tensors


def model_parameters(model: Any) -> list[Any]:
    import torch

    kinds = (torch.nn.Parameter, FlatPart)
    return list({id(tensor): tensor for tensor in model_tensors(model).values() if isinstance(tensor, kinds)}.values())


def num_elements(parameter: Any) -> int:
    """Return a parameter's number of elements, even if ZeRO-3 has emptied the parameter."""
    return int(getattr(parameter, "ds_numel", None) or parameter.numel())


def _sharded(model: Any) -> dict[Any, dict[str, Any]]:
    found: dict[Any, dict[str, Any]] = {}
    for module in model.modules():
        if hasattr(type(module), "_get_fsdp_state"):
            state = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
            for shard in (shard for group in groups if group is not None for shard in group.fsdp_params):
                info = shard._module_info
                # Before the first forward pass, a module may hold a tensor other than its registered shard.
                current = info.module._parameters.get(info.param_name)
                tensor = current if is_sharded(current) else shard.sharded_param
                for owner, name in zip(
                    (info.module, *info.shared_modules), (info.param_name, *info.shared_param_names), strict=True
                ):
                    found.setdefault(owner, {})[name] = tensor
        if (flat := flat_parameter(module)) is not None:
            parts = _flat_parts(flat, is_replicated=not module._handle.uses_sharded_strategy)
            for info, tensor in zip(flat._param_infos, parts, strict=True):
                found.setdefault(info.module, {})[info.param_name] = tensor
            for info in flat._shared_param_infos:
                found.setdefault(info.module, {})[info.param_name] = found[info.prim_module][info.prim_param_name]
    return found


def flat_parameter(module: Any) -> Any:
    return getattr(vars(module).get("_handle"), "flat_param", None)


def _flat_parts(flat: Any, *, is_replicated: bool) -> Iterator[FlatPart]:
    # Before the first forward pass, `flat` is the shard itself. Later it may hold the gathered parameter instead.
    shard = getattr(flat, "_local_shard", flat).detach()
    parameters = flat._params or [flat] * len(flat._shapes)
    for parameter, shape, own in zip(parameters, flat._shapes, flat._shard_param_infos, strict=True):
        first, count = own.offset_in_shard or 0, own.numel_in_shard or 0
        yield FlatPart(
            values=shard[first : first + count],
            start=own.intra_param_start_idx or 0,
            shape=tuple(shape),
            requires_grad=parameter.requires_grad,
            is_replicated=is_replicated,
        )


def layout_of(tensors: Mapping[str, Any]) -> WeightLayout:
    """Lay out tensors in one array per dtype, storing tied tensors once. Raise InvalidRecord for unsupported dtypes."""
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
            raise InvalidRecord(f"weights: tensor {name!r} is {dtype}; supported dtypes are {', '.join(ITEM_BYTES)}")
        entry = StoredTensor(
            name=name, dtype=dtype, shape=tuple(local.shape), start=places.get(dtype, 0), **_place_in_whole(tensor)
        )
        places[dtype] = entry.start + entry.numel
        stored.append(entry)
    return WeightLayout(tensors=tuple(stored), tied=tied)


def is_sharded(tensor: Any) -> bool:
    return isinstance(tensor, FlatPart) or type(tensor).__name__ == "DTensor" or hasattr(tensor, "device_mesh")


def replicated(tensor: Any) -> Any:
    """Return a replicated DTensor's value. Return None for any other DTensor, because reading it needs a collective."""
    return tensor.to_local() if all(placement.is_replicate() for placement in tensor.placements) else None


def local_part(tensor: Any) -> Any:
    if isinstance(tensor, FlatPart):
        return tensor.values
    tensor = tensor.detach()
    return tensor.to_local() if is_sharded(tensor) else tensor


def _place_in_whole(tensor: Any) -> dict[str, Any]:
    if isinstance(tensor, FlatPart):
        return {"whole_shape": tensor.shape, "offsets": (tensor.start,)}
    if not is_sharded(tensor):
        return {}
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return {"whole_shape": tuple(tensor.shape), "offsets": tuple(offsets)}
